"""The runs a page offers: the sampler's own, the folders it was given, and those of the folder of runs.

A browser names a run by its key, which is looked up here and never becomes a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.errors import BadInput
from flatout.monitor.sampler import Sampler
from flatout.runs import Run, list_runs, read_run, state_of

MACHINE = "machine"
MOST_LISTED = 200
SENT = ("pid", "rank", "world_size", "started_s", "ended_s")  # of a run, where they are known


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run of the list; without a run, this machine."""

    key: str
    run: Run | None = None

    @property
    def name(self) -> str:
        return "this machine" if self.run is None else self.run.name

    @property
    def state(self) -> str:
        return "running" if self.run is None else state_of(self.run)

    def to_json(self) -> dict[str, Any]:
        known = {name: value for name in SENT if (value := getattr(self.run, name, None)) is not None}
        return {"key": self.key, "name": self.name, "state": self.state, **known}


class RunList:
    """Keys and folders of runs; `read` looks again."""

    def __init__(
        self, *, sampler: Sampler | None = None, folders: Sequence[Path] = (), root: Path | None = None
    ) -> None:
        self._given = tuple(folders)
        self._root = root
        self._own_folder = None if sampler is None else sampler.job_folder
        self.own_key: str | None = None
        if sampler is not None:
            self.own_key = MACHINE if self._own_folder is None else self._own_folder.name
        self.folders: dict[str, Path] = {}
        self.entries: tuple[Entry, ...] = ()
        self.read()

    @property
    def first(self) -> list[str]:
        """The runs to open by default: the sampler's job, the given folders, or a running one.

        If there is none of these: the machine alone, or the last run.
        """
        if self._own_folder is not None:
            return [self._own_folder.name]
        given = [key for key, folder in self.folders.items() if folder in self._given]
        under_way = (entry.key for entry in self.entries if entry.key != MACHINE and entry.state == "running")
        machine = [] if self.own_key is None else [self.own_key]
        return given or [*under_way][:1] or machine or list(self.folders)[:1]

    def read(self) -> tuple[Entry, ...]:
        found: dict[Path, tuple[Path, Run]] = {}
        for folder in (*([] if self._own_folder is None else [self._own_folder]), *self._given):
            try:
                found.setdefault(folder.resolve(), (folder, read_run(folder)))
            except BadInput:
                continue
        for folder, run in list_runs(self._root, kind="watch")[:MOST_LISTED]:
            found.setdefault(folder.resolve(), (folder, run))
        entries = [Entry(key=MACHINE)] if self.own_key == MACHINE else []
        folders: dict[str, Path] = {}
        for folder, run in found.values():
            key = folder.name
            while key in folders or key == MACHINE:
                key += "~"  # two folders of one name, from two places
            folders[key] = folder
            entries.append(Entry(key=key, run=run))
        self.folders, self.entries = folders, tuple(entries)
        return self.entries
