"""Runs of every verb: what `flatout watch --list`, `report` and `compare` say of each.

A watched run has samples (`history.py`).  The run of an engine (evolve, adapt, steer) has a `log.jsonl`: a
first line that says what it is, then one JSON object per report, with the number of its `step` or `epoch`,
perhaps a `phase`, `elapsed_s`, and any numbers under names of their own.  That is all this module knows of
engines.  A run that resumed does some steps a second time; the later line counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.ground.codec import encode
from flatout.ground.errors import BadInput
from flatout.ground.runs import (
    CHANNEL_FILE,
    Run,
    SeenRun,
    list_runs,
    read_regular,
    read_run,
    state_of,
    time_of,
)
from flatout.monitor.job.channel import read_channel

LOG_FILE = "log.jsonl"
LARGEST_LOG = 256 * 2**20
WATCHED = "watch"
COUNTERS = ("step", "epoch")
NOT_FIGURES = (*COUNTERS, "epochs", "elapsed_s")
SHOWN_FIRST = ("reward_heldout", "score", "reward", "loss")  # what stands for a run in one line of a list

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDigest(SeenRun):
    """What run.json says, and what the run reported last."""

    steps: int | None = None
    step_s: float | None = None
    duration_s: float | None = None  # None: it died, and nobody knows when
    last: dict[str, float] = field(default_factory=dict)  # every figure's last known value, by its path

    @property
    def figure(self) -> tuple[str, float] | None:
        """The score or loss that represents the run, with its name; None if it has neither."""
        found = (item for word in SHOWN_FIRST for item in self.last.items() if word in item[0])
        return next(found, None)

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("state", "steps", "step_s", "duration_s", "last")}
        return {
            "format": "flatout-run-digest",
            "version": 1,
            "folder": str(self.folder),
            **own,
            **encode(self.run),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineComparison:
    """Two runs of one engine: (name, first, second) of every figure that both or one of them know."""

    first: RunDigest
    second: RunDigest
    figures: tuple[tuple[str, float | None, float | None], ...]

    def to_json(self) -> dict[str, Any]:
        runs = {"first": self.first.to_json(), "second": self.second.to_json()}
        return {"format": "flatout-engine-comparison", "version": 1, **runs, "figures": encode(self.figures)}


def digest_runs(root: Path | None = None) -> tuple[RunDigest, ...]:
    """Digest every run, the latest first."""
    return tuple(_digest_or_less(folder, run) for folder, run in list_runs(root))


def _digest_or_less(folder: Path, run: Run) -> RunDigest:
    """Digest a run; of one whose log holds nonsense, say what run.json says: the others are listed too."""
    try:
        return digest_run(folder, run)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return RunDigest(folder=folder, run=run, state=state_of(run))


def digest_run(folder: Path, run: Run | None = None) -> RunDigest:
    """Read what a run reported last: a watched one in its channel, an engine's in its log."""
    run = run or read_run(folder)
    state = state_of(run)
    ended_s = run.ended_s or (time_of(run, time.time()) if state == "running" else None)
    wall_s = None if ended_s is None else ended_s - run.started_s
    if run.kind == WATCHED:
        reported = read_channel(folder / CHANNEL_FILE)
        if wall_s is None and reported is not None:  # it died: as long as it reported
            wall_s = max(reported.time_s - run.started_s, 0.0)
        last = {} if reported is None or reported.loss is None else {"loss": reported.loss}
        steps = None if reported is None else reported.steps
        return RunDigest(folder=folder, run=run, state=state, steps=steps, duration_s=wall_s, last=last)
    records = list(_records(folder / LOG_FILE))
    by_phase: dict[str, dict[int, Record]] = {}  # the later of two reports of one step counts
    for record in records:
        number = _number_of(record)
        if number is not None:
            by_phase.setdefault(str(record.get("phase", "")), {})[number] = record
    spans = [span for phase in by_phase.values() if (span := _span(phase)) is not None]
    timed = [(steps, spent_s) for _, steps, spent_s in spans if steps > 0]
    return RunDigest(
        folder=folder,
        run=run,
        state=state,
        steps=sum(max(phase) for phase in by_phase.values()) if by_phase else None,
        step_s=sum(s for _, s in timed) / sum(n for n, _ in timed) if timed else None,
        duration_s=sum(total_s for total_s, _, _ in spans) if spans else wall_s,  # resumed parts included
        last=_last_figures(records),
    )


def compare_engines(first: Path, second: Path) -> EngineComparison:
    """Compare two runs of one engine; raise BadInput if they ran different verbs."""
    kinds = [read_run(folder).kind for folder in (first, second)]
    if kinds[0] != kinds[1]:
        raise BadInput(
            f"{first.name} ran {kinds[0]} and {second.name} {kinds[1]}: their figures mean different things",
            hint="compare two runs of the same verb",
        )
    a, b = digest_run(first), digest_run(second)
    rows: list[tuple[str, float | None, float | None]] = [
        ("duration_s", a.duration_s, b.duration_s),
        ("steps", a.steps, b.steps),
        ("step_s", a.step_s, b.step_s),
    ]
    rows += [(name, a.last.get(name), b.last.get(name)) for name in dict.fromkeys((*a.last, *b.last))]
    known = tuple(row for row in rows if row[1] is not None or row[2] is not None)
    return EngineComparison(first=a, second=b, figures=known)


# The log


def _records(path: Path) -> Iterator[Record]:
    """Yield the reports of a log; skip the header, torn lines and anything else."""
    try:
        lines = read_regular(path, most_bytes=LARGEST_LOG).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and "format" not in record:
            yield record


def _number_of(record: Record) -> int | None:
    return next((record[name] for name in COUNTERS if isinstance(record.get(name), int)), None)


def _span(phase: dict[int, Record]) -> tuple[float, int, float] | None:
    """Return the seconds in all, and the steps and seconds from the first report to the last."""
    timed = [(n, float(r["elapsed_s"])) for n, r in sorted(phase.items()) if r.get("elapsed_s") is not None]
    if not timed:
        return None
    (first, start_s), (last, end_s) = timed[0], timed[-1]
    return end_s, last - first, end_s - start_s


def _last_figures(records: Iterable[Record]) -> dict[str, float]:
    found: dict[str, float] = {}
    for record in records:
        phase = f"{record['phase']}/" if isinstance(record.get("phase"), str) else ""
        rest = {name: value for name, value in record.items() if name not in NOT_FIGURES}
        found |= {f"{phase}{path}": value for path, value in _numbers(rest)}
    return found


def _numbers(values: Record, place: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        path = f"{place}/{name}" if place else name
        if isinstance(value, dict):
            yield from _numbers(value, path)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield path, float(value)
