"""The runs a page offers: the sampler's own, the folders it was given, and those of the folder of runs.

A browser names a run by its key, which is looked up here and never becomes a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.codec import encode
from flatout.errors import BadInput
from flatout.monitor.sampler import Sampler
from flatout.runs import Run, list_runs, read_run, state_of

MACHINE = "machine"
MOST_LISTED = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run of the list."""

    key: str
    name: str
    state: str
    pid: int | None = None
    rank: int | None = None
    world_size: int | None = None
    started_s: float | None = None
    ended_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in encode(self).items() if value is not None}


class Catalogue:
    """Keys and folders of runs; `read` looks again."""

    def __init__(
        self, *, sampler: Sampler | None = None, folders: Sequence[Path] = (), root: Path | None = None
    ) -> None:
        self._folders = tuple(folders)
        self._root = root
        self._own_folder = None if sampler is None or sampler.job is None else sampler.job.folder
        self.own_key: str | None = None
        if sampler is not None:
            self.own_key = MACHINE if self._own_folder is None else self._own_folder.name
        self.folders: dict[str, Path] = {}
        self.entries: tuple[Entry, ...] = ()
        self.read()

    @property
    def first(self) -> list[str]:
        """What a page opens that was not told: the sampler's job, the folders given, or a run under way.

        Where there is none of these, the machine alone, or the run that was the last.
        """
        if self._own_folder is not None:
            return [self._own_folder.name]
        given = [key for key, folder in self.folders.items() if folder in self._folders]
        under_way = [entry.key for entry in self.entries if entry.state == "running" and entry.key != MACHINE]
        machine = [] if self.own_key is None else [self.own_key]
        return given or under_way[:1] or machine or list(self.folders)[:1]

    def read(self) -> tuple[Entry, ...]:
        own = () if self._own_folder is None else (self._own_folder,)
        found: dict[Path, tuple[Path, Run]] = {}
        for folder in (*own, *self._folders):
            try:
                found.setdefault(folder.resolve(), (folder, read_run(folder)))
            except BadInput:
                continue
        for folder, run in list_runs(self._root, kind="watch")[:MOST_LISTED]:
            found.setdefault(folder.resolve(), (folder, run))
        folders: dict[str, Path] = {}
        entries = [Entry(key=MACHINE, name="this machine", state="running")] * (self.own_key == MACHINE)
        for folder, run in found.values():
            key = folder.name
            while key in folders or key == MACHINE:
                key += "~"  # two folders of one name, from two places
            folders[key] = folder
            entries.append(_entry(key, run))
        self.folders, self.entries = folders, tuple(entries)
        return self.entries


def _entry(key: str, run: Run) -> Entry:
    return Entry(
        key=key,
        name=run.name,
        state=state_of(run),
        pid=run.pid,
        rank=run.rank,
        world_size=run.world_size,
        started_s=run.started_s,
        ended_s=run.ended_s,
    )
