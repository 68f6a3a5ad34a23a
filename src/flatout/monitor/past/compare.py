"""Two runs side by side, with the differences that matter and those that are noise.

A run's figure is a mean, and its stretches differ among themselves: a shared machine, a warm-up, the end of
an epoch.  A difference between two runs counts only if it exceeds that.  The interval of the ratio is a
bootstrap over whole blocks of neighbouring points, because neighbours are alike and points are not
independent; a difference under one percent is not reported even if it is certain.  The first tenth of each
run is left out: it holds the filling of caches, autotuning and compilation.

Two runs are not an experiment.  Whatever else changed between them (another GPU, another batch, another job
on the machine) is part of the difference, and the comparison names those changes that it can see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from flatout.ground.codec import encode
from flatout.ground.runs import show_state
from flatout.measure import PHASES
from flatout.monitor.past.outline import RunOutline
from flatout.monitor.past.summary import Summary, gpu_figure, job_figure, last_loss, summarise, weights
from flatout.monitor.sample import Sample

FEWEST_POINTS = 8
WARM_UP_SHARE = 0.1
WORTH_SAYING = 0.01

DifferenceOutcome = Literal[
    "better", "worse", "higher", "lower", "within noise", "too short to tell", "unknown"
]
FigureUnit = Literal["s", "bytes", "W", "J", "per s", "share"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One figure of both runs."""

    name: str
    unit: FigureUnit
    first: float | None
    second: float | None
    outcome: DifferenceOutcome
    ratio: float | None = None  # second over first
    ratio_low: float | None = None  # 95 % interval; None for what has no spread, such as a peak
    ratio_high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two runs and how they differ."""

    first: Summary
    second: Summary
    differences: tuple[Difference, ...]
    caveats: tuple[str, ...]  # what else is different between them

    @property
    def that_matter(self) -> tuple[Difference, ...]:
        return tuple(each for each in self.differences if each.outcome in ("better", "worse"))

    def to_json(self) -> dict[str, Any]:
        return {"format": "flatout-comparison", "version": 1, **encode(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Figure:
    """How a figure is read from a point, and which direction of it is good; None: neither."""

    name: str
    unit: FigureUnit
    of: Callable[[Sample], float | None]
    less_is_better: bool | None
    by_steps: bool = False  # a mean over steps, not over time


def _phase(phase: str) -> Callable[[Sample], float | None]:
    """Read a phase in seconds: a share also falls when another phase grows."""

    def read(point: Sample) -> float | None:
        job = point.job
        if job is None or job.step_s is None or job.phases is None or not job.phases.get(phase):
            return None
        return job.step_s * job.phases[phase]

    return read


FIGURES = (
    _Figure(name="step time", unit="s", of=job_figure("step_s"), less_is_better=True, by_steps=True),
    _Figure(name="steps per second", unit="per s", of=job_figure("steps_per_s"), less_is_better=False),
    _Figure(name="samples per second", unit="per s", of=job_figure("samples_per_s"), less_is_better=False),
    *(
        _Figure(name=f"step: {phase}", unit="s", of=_phase(phase), less_is_better=True, by_steps=True)
        for phase in PHASES
    ),
    _Figure(name="GPU utilisation", unit="share", of=gpu_figure("utilisation_share"), less_is_better=None),
    _Figure(name="SM activity", unit="share", of=gpu_figure("sm_active_share"), less_is_better=None),
    _Figure(name="power", unit="W", of=gpu_figure("power_w"), less_is_better=None),
    *(
        _Figure(
            name=f"energy per {of}",
            unit="J",
            of=job_figure(f"energy_per_{of}_j"),
            less_is_better=True,
            by_steps=True,
        )
        for of in ("step", "sample")
    ),
)
# Peaks have no spread: they are what they are.
PeakFigure = tuple[str, bool | None, Callable[[Summary], float | None]]  # whether less is better
PEAKS: tuple[PeakFigure, ...] = (
    ("peak memory of tensors", True, lambda summary: summary.peak_allocated_bytes),
    ("peak memory reserved", True, lambda summary: summary.peak_reserved_bytes),
    # Of these two the job may not be the only user.
    ("peak memory of the GPU", None, lambda summary: summary.device_memory_bytes),
    ("peak memory of the host", None, lambda summary: summary.host_memory_bytes),
)


def compare(first: RunOutline, second: RunOutline) -> Comparison:
    """Compare the figures that at least one run knows, in the order of FIGURES."""
    summaries = (summarise(first), summarise(second))
    longest_s = max(summaries[0].step_s or 0.0, summaries[1].step_s or 0.0)
    found = [_difference(figure, first.points, second.points, step_s=longest_s) for figure in FIGURES]
    found += [_peak(peak, *summaries) for peak in PEAKS]
    known = [each for each in found if each.first is not None or each.second is not None]
    return Comparison(
        first=summaries[0],
        second=summaries[1],
        differences=tuple(known),
        caveats=tuple(_caveats(first, second, summaries)),
    )


def _difference(
    figure: _Figure, first: Sequence[Sample], second: Sequence[Sample], *, step_s: float
) -> Difference:
    points = _weigh(figure, first), _weigh(figure, second)
    means = _mean(points[0]), _mean(points[1])
    found = Difference(name=figure.name, unit=figure.unit, first=means[0], second=means[1], outcome="unknown")
    if means[0] is None or means[1] is None or means[0] <= 0 or means[1] <= 0:
        is_same = means[0] is not None and means[0] == means[1]
        return replace(found, outcome="within noise") if is_same else found
    ratio = means[1] / means[0]
    if min(map(len, points)) < FEWEST_POINTS:
        return replace(found, ratio=ratio, outcome="too short to tell")
    low, high = _interval(*points)
    outcome = _outcome(ratio, low, high, less_is_better=figure.less_is_better)
    if figure.unit == "s" and abs(means[1] - means[0]) < WORTH_SAYING * step_s:
        outcome = "within noise"  # a phase can double and still be nothing of the step
    return replace(
        found, ratio=ratio, outcome=outcome, ratio_low=min(low, ratio), ratio_high=max(high, ratio)
    )


def _outcome(ratio: float, low: float, high: float, *, less_is_better: bool | None) -> DifferenceOutcome:
    if low <= 1.0 <= high or abs(ratio - 1.0) < WORTH_SAYING:
        return "within noise"
    if less_is_better is None:
        return "higher" if ratio > 1 else "lower"
    return "better" if (ratio < 1) == less_is_better else "worse"


def _peak(peak: PeakFigure, a: Summary, b: Summary) -> Difference:
    name, less_is_better, figure = peak
    first, second = figure(a), figure(b)
    if first is None or second is None or first <= 0:
        return Difference(name=name, unit="bytes", first=first, second=second, outcome="unknown")
    ratio = second / first
    outcome = _outcome(ratio, ratio, ratio, less_is_better=less_is_better)
    return Difference(name=name, unit="bytes", first=first, second=second, outcome=outcome, ratio=ratio)


Weighted = list[tuple[float, float]]  # (value, weight)


def _weigh(figure: _Figure, points: Sequence[Sample]) -> Weighted:
    if figure.by_steps:
        pairs: list[tuple[Sample, float]] = [(point, float(steps)) for point, steps in weights(points)]
    else:
        pairs = [(point, point.span_s or 1.0) for point in points]
    pairs = pairs[math.floor(len(pairs) * WARM_UP_SHARE) :]
    return [(value, weight) for point, weight in pairs if (value := figure.of(point)) is not None]


def _mean(values: Weighted) -> float | None:
    whole = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / whole if whole > 0 else None


def _interval(first: Weighted, second: Weighted) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of means, by resampling blocks of each run's points."""
    import numpy as np

    from flatout.measure.statistics import bootstrap_interval

    random = np.random.default_rng(0)

    def blocks(values: Weighted) -> tuple[Any, Any, int]:
        """Sum every block of neighbours; blocks go round the end, so each point counts as often."""
        table = np.array(values)
        num = len(table)
        size = max(round(math.sqrt(num)), 1)
        members = (np.arange(num)[:, None] + np.arange(size)) % num
        weight = table[:, 1]
        return (table[:, 0] * weight)[members].sum(axis=1), weight[members].sum(axis=1), math.ceil(num / size)

    (sums, counts, num_drawn), (later_sums, later_counts, num_later) = blocks(first), blocks(second)

    def ratio(later: Any) -> Any:
        drawn = random.integers(len(sums), size=(len(later), num_drawn))
        mean = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
        return later_sums[later].sum(axis=1) / later_counts[later].sum(axis=1) / mean

    return bootstrap_interval(ratio, num_values=len(second), num_drawn=num_later, random=random)


def _caveats(first: RunOutline, second: RunOutline, summaries: tuple[Summary, Summary]) -> list[str]:
    found = []
    a, b = summaries
    if a.gpu_name != b.gpu_name:
        found.append(f"they ran on different GPUs: {a.gpu_name or 'none'} and {b.gpu_name or 'none'}")
    rows = [each.samples / each.steps if each.samples and each.steps else None for each in summaries]
    if rows[0] and rows[1] and abs(rows[0] / rows[1] - 1) > WORTH_SAYING:
        sizes = f"{rows[0]:.4g} and {rows[1]:.4g} samples"
        found.append(f"their steps differ in size: {sizes}; compare per sample, not per step")
    for number, recorded in enumerate((first, second), start=1):
        if recorded.state == "died":
            found.append(f"run {number} died before its end")
        elif recorded.state == "running":
            found.append(f"run {number} is still running")
        elif recorded.run.end not in (None, "finished"):
            found.append(f"run {number}: {show_state(recorded.run)}")
        if summaries[number - 1].loss_lost_s is not None:
            found.append(f"the loss of run {number} is {last_loss(summaries[number - 1])}")
    return found
