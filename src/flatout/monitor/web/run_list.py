"""The runs that a page offers: the sampler's own, the folders it was given, and those of the folder of runs.

Of each the list tells how it ended, what bounded it last and its last loss.  These come from the end of its
log, which is read once for a run that has ended, and again only where the log has grown.  A look reads a few
logs at most, so that a folder of hundreds of runs is listed at once and filled in while it is looked at.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.ground.errors import BadInput
from flatout.ground.runs import Run, list_runs, read_run, runs_folder, show_state, state_of
from flatout.ground.units import UNKNOWN
from flatout.monitor.fleet.logs import Log
from flatout.monitor.fleet.nodes import SILENT_S, Fleet
from flatout.monitor.past.history import RAW, HistoryTail, read_end, segments
from flatout.monitor.sample import last_seconds
from flatout.monitor.sampler import Sampler
from flatout.monitor.verdicts.verdict import ENOUGH_SAMPLES, WINDOW_S, drop_start, judge

MACHINE = "machine"
MOST_LISTED = 200
SENT = ("pid", "rank", "world_size", "host", "started_s", "ended_s")  # of a run, if they are known
LONGEST_COMMAND = 200
END_BYTES = 2**17  # of a log: some two minutes
MOST_READ = 8  # logs at one look


@dataclass(frozen=True, kw_only=True, slots=True)
class Glance:
    """The state of a run at the end of its log."""

    bound: str | None = None
    loss: float | None = None
    last_s: float | None = None  # the time of its last sample
    steps_per_s: float | None = None  # this and the following: of a node that is followed
    gpu_share: float | None = None
    gpu_memory_share: float | None = None
    cpu_share: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run of the list; without a run, this machine."""

    key: str
    run: Run | None = None
    glance: Glance = Glance()
    node: str | None = None  # of a fleet
    seen: str | None = None  # the state of a run whose process is elsewhere
    problem: str | None = None  # why its page does not answer

    @property
    def name(self) -> str:
        if self.run is None:
            return "this machine" if self.problem is None else UNKNOWN
        return self.run.name

    @property
    def state(self) -> str:
        return self.seen or ("running" if self.run is None else state_of(self.run))

    @property
    def ending(self) -> str:
        if self.seen == "silent" and self.problem is not None:
            return f"silent: {self.problem}"
        return self.seen or ("running" if self.run is None else show_state(self.run))

    def to_json(self) -> dict[str, Any]:
        known = {name: value for name in SENT if (value := getattr(self.run, name, None)) is not None}
        for name in Glance.__slots__:
            if (value := getattr(self.glance, name)) is not None:
                known[name] = value
        known |= {} if self.node is None else {"node": self.node}
        if (
            self.run is not None and self.run.command
        ):  # without the interpreter, which is long and says little
            known["command"] = " ".join(self.run.command[1:])[:LONGEST_COMMAND]
        return {"key": self.key, "name": self.name, "state": self.state, "ending": self.ending, **known}


def seen_from_here(run: Run, glance: Glance) -> str | None:
    """Return the state of another machine's run, by its log; None: its process can be asked here."""
    if run.host in (None, socket.gethostname()) or run.ended_s is not None or glance.last_s is None:
        return None
    return "running" if time.time() - glance.last_s < SILENT_S else "silent"


class RunList:
    """Keys and folders of runs; `read` looks again."""

    def __init__(
        self, *, sampler: Sampler | None = None, folders: Sequence[Path] = (), root: Path | None = None
    ) -> None:
        self._given = tuple(folders)
        self._root = root
        self._own_folder = None if sampler is None else sampler.job_folder
        self._glances: dict[Path, tuple[tuple[int, int], Glance]] = {}  # with the size of its log
        self.own_key: str | None = None
        if sampler is not None:
            self.own_key = MACHINE if self._own_folder is None else self._own_folder.name
        self.folders: dict[str, Path] = {}
        self.entries: tuple[Entry, ...] = ()
        self.num_unlisted = 0  # older ones
        self.read()

    @property
    def folder(self) -> Path:
        """Where runs are looked for."""
        return (self._root or runs_folder()).absolute()

    @property
    def first(self) -> list[str]:
        """The runs to open by default: the sampler's job, the given folders, or a running one.

        If there are none: the machine alone, or the last run.
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
        kept = [each for each in list_runs(self._root, kind="watch") if not self._is_own_log(each[1])]
        self.num_unlisted = max(len(kept) - MOST_LISTED, 0)
        for folder, run in kept[:MOST_LISTED]:
            found.setdefault(folder.resolve(), (folder, run))
        self._look(list(found))
        entries = [Entry(key=MACHINE)] if self.own_key == MACHINE else []
        folders: dict[str, Path] = {}
        for real, (folder, run) in found.items():
            key = folder.name
            while key in folders or key == MACHINE:
                key += "~"  # two folders of one name, from two places
            folders[key] = folder
            _, glance = self._glances.get(real, (None, Glance()))
            entries.append(Entry(key=key, run=run, glance=glance, seen=seen_from_here(run, glance)))
        self.folders, self.entries = folders, tuple(entries)
        return self.entries

    def _is_own_log(self, run: Run) -> bool:
        """Return whether it is the log of this machine that this process keeps, which is listed as such."""
        is_own = run.name == MACHINE and run.pid == os.getpid() and state_of(run) == "running"
        return self.own_key == MACHINE and is_own

    def log_of(self, key: str) -> Log | None:
        """Return the log behind a key."""
        folder = self.folders.get(key)
        return None if folder is None else HistoryTail(folder)

    def _look(self, folders: Sequence[Path]) -> None:
        """Read the ends of a few logs that have grown."""
        num_read = 0
        for folder in folders:
            size = _log_size(folder)
            if size is not None and self._glances.get(folder, (None,))[0] != size and num_read < MOST_READ:
                self._glances[folder] = (size, glance_at(folder))
                num_read += 1
        self._glances = {folder: self._glances[folder] for folder in folders if folder in self._glances}


class FleetRuns:
    """The list of a fleet: one entry for each node, with what it does at present."""

    own_key = None
    num_unlisted = 0

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.entries: tuple[Entry, ...] = ()
        self.read()

    @property
    def folder(self) -> str:
        return ", ".join(source for source in self._fleet.sources if "://" not in source) or "the nodes"

    @property
    def first(self) -> list[str]:
        """The node that is opened by default: one that runs."""
        running = [entry.key for entry in self.entries if entry.state == "running"]
        return (running or [entry.key for entry in self.entries])[:1]

    def read(self) -> tuple[Entry, ...]:
        """Ask all nodes."""
        states = self._fleet.look()
        figures = ("bound", "loss", "steps_per_s", "gpu_share", "gpu_memory_share", "cpu_share")
        self.entries = tuple(
            Entry(
                key=node.key,
                run=node.run,
                node=state.node,
                seen=state.state,
                problem=state.problem,
                glance=Glance(**{name: getattr(state, name) for name in figures}),
            )
            for node, state in zip(self._fleet.nodes, states, strict=True)
        )
        return self.entries

    def log_of(self, key: str) -> Log | None:
        """Open another log for a browser that opens a node: the fleet's has been read already."""
        return self._fleet.open_log(key)


def _log_size(folder: Path) -> tuple[int, int] | None:
    """Return the number of the last file of a log, and its size; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        number, path = max(segments(folder, RAW).items())
        return number, path.stat().st_size
    return None


def glance_at(folder: Path) -> Glance:
    """Read the end of a log: what bounded the run before it ended, and its last loss."""
    samples = list(read_end(folder, RAW, most_bytes=END_BYTES))[-600:]
    if not samples:
        return Glance()
    losses = [sample.job.loss for sample in samples if sample.job is not None and sample.job.loss is not None]
    stepped = [
        sample for sample in samples if sample.job is None or sample.job.state not in ("ended", "died")
    ]
    recent = drop_start(last_seconds(stepped, WINDOW_S)) if stepped else ()
    bound = judge(recent)[0].bound if len(recent) >= ENOUGH_SAMPLES else None
    return Glance(bound=bound, loss=losses[-1] if losses else None, last_s=round(samples[-1].time_s, 1))
