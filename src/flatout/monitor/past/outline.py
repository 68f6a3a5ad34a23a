"""A whole run, reduced to what a page can show: some hundred points and a verdict for every stretch.

A log of weeks does not fit into memory, so it is read once, in order, a stretch at a time: each stretch gives
its verdict and a few points, every one the merger of the samples it stands for.  Where the points are
minutes apart, the tier of minutes is read instead of the seconds it was made from; the last minute of the
run, in which it may have died, always comes from the finest tier.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.ground.errors import BadInput
from flatout.ground.runs import SeenRun, read_run, state_of
from flatout.monitor.past.history import GRAINS, read_end, read_tier, replay
from flatout.monitor.sample import Sample, merge
from flatout.monitor.verdicts.verdict import ENOUGH_SAMPLES, drop_start, judge
from flatout.monitor.verdicts.window import Verdict

NUM_STRETCHES = 60
POINTS_PER_STRETCH = 5
SHORTEST_STRETCH_S = 10.0
MINUTE_S = 60.0
MOST_NOTES = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A part of the run and what bounded it; None if there is too little to say."""

    start_s: float  # since the epoch
    end_s: float
    verdict: Verdict | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutline(SeenRun):
    """A run as its log records it."""

    points: tuple[Sample, ...]  # in order of time; at least one
    stretches: tuple[Stretch, ...]
    notes: tuple[tuple[float, str], ...]  # what happened, and when

    @property
    def start_s(self) -> float:
        return self.points[0].start_s

    @property
    def end_s(self) -> float:
        return self.points[-1].time_s

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def read_outline(folder: Path) -> RunOutline:
    """Read the run in a folder; raise BadInput if there is none, or if it has no samples."""
    run = read_run(folder)
    start_s, end_s = _ends(folder)
    stretch_s = max((end_s - start_s) / NUM_STRETCHES, SHORTEST_STRETCH_S)
    points: list[Sample] = []
    stretches: list[Stretch] = []
    notes: deque[tuple[float, str]] = deque(maxlen=MOST_NOTES)
    point_s = stretch_s / POINTS_PER_STRETCH
    logged = replay(folder, finest="raw" if point_s < MINUTE_S else "minutes")
    for samples in _groups(logged, start_s, stretch_s):
        stretches.append(
            Stretch(start_s=samples[0].start_s, end_s=samples[-1].time_s, verdict=_verdict(samples))
        )
        points += [merge(group) for group in _groups(samples, start_s, point_s)]
        notes += [(sample.time_s, note) for sample in samples for note in sample.notes]
    return RunOutline(
        folder=folder,
        run=run,
        state=state_of(run),
        points=tuple(points),
        stretches=tuple(stretches),
        notes=tuple(notes),
    )


def _ends(folder: Path) -> tuple[float, float]:
    """Find when the log begins and ends without reading all of it."""
    tiers = [grain.name for grain in GRAINS]
    starts = [first.start_s for tier in tiers if (first := next(read_tier(folder, tier), None)) is not None]
    ends = [sample.time_s for tier in tiers for sample in read_end(folder, tier, most_bytes=1)]
    if not starts or not ends:
        raise BadInput(f"the run {folder.name} has no samples", hint="it ended before the first sample")
    return min(starts), max(ends)


def _groups(samples: Iterable[Sample], start_s: float, length_s: float) -> Iterator[list[Sample]]:
    """Group the samples of each stretch."""
    group: list[Sample] = []
    for sample in samples:
        if group and _slot(sample, start_s, length_s) != _slot(group[-1], start_s, length_s):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def _slot(sample: Sample, start_s: float, length_s: float) -> int:
    # A sample stands for the time before it: one at the end of a slot belongs to that slot.
    return max(math.ceil((sample.time_s - start_s) / length_s) - 1, 0)


def _verdict(samples: Sequence[Sample]) -> Verdict | None:
    """Ask a stretch of any length the same questions as a live run."""
    samples = drop_start(samples)
    if len(samples) < ENOUGH_SAMPLES:
        return None
    lost = sum(sample.job is not None and sample.job.has_bad_loss for sample in samples)
    # An alarm is about the end of a stretch; the stretch counts as lost if most of it is.
    held = [each for each in judge(samples) if each.bound != "diverged" or 2 * lost >= len(samples)]
    return None if not held or held[0].bound == "unknown" else held[0]
