"""The recorded steps, before and after the GPU's clock is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.measure.arms.arm import REAL, UNWATCHED
from flatout.measure.clock import EXCLUDED, phases_s, read_marks
from flatout.measure.evidence import INSTRUMENTS, Counterfactual, Step
from flatout.measure.statistics import FEWEST_STEPS, compare, outliers

MOST_STEPS = 0.6  # for a number of model calls to be the usual one: a game may come before every third step
MOST_WATCHING = 0.5  # of a step
AS_THEY_ARE = ("warmup", UNWATCHED, *INSTRUMENTS)  # steps without the usual notes, or slowed by more


@dataclass(slots=True)
class StepRow:
    """One recorded step, before the GPU's clock is read."""

    index: int
    arm: str
    block: int
    transition: bool
    totals: list[float]
    marks: list[tuple[int, Any]]
    rows: int | None
    num_batches: int
    num_forwards: int
    num_backwards: int
    epoch_start: bool
    begins_epoch: bool = False  # of the training loader
    ended_at_s: float = 0.0
    in_line_s: float = 0.0  # of it, queued for a core that others held
    apart: bool = False  # holds an evaluation, a checkpoint or the like: not a typical step

    @property
    def host_s(self) -> float:
        return sum(self.totals) - self.totals[EXCLUDED]


def real_rows(rows: Sequence[StepRow]) -> Sequence[StepRow]:
    """Return the timed steps that ran unchanged, or the last step if there is none."""
    return [row for row in rows if row.arm == REAL and not row.transition] or rows[-1:]


def real_step_s(rows: Sequence[StepRow]) -> float:
    """Return the mean time of these steps."""
    timed = real_rows(rows)
    return sum(row.host_s for row in timed) / len(timed)


def usual_forwards(rows: Sequence[StepRow]) -> int | None:
    """Return how many times most steps call a model; None if that differs from step to step."""
    found = Counter(row.num_forwards for row in rows)
    number, times = found.most_common(1)[0] if found else (None, 0)
    return number if len(rows) >= FEWEST_STEPS and times >= MOST_STEPS * len(rows) else None


@dataclass(frozen=True, slots=True)
class Watching:
    """What the notes on a step add to it, with the 95 % interval."""

    seconds: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0

    def taken_off(self, found: Counterfactual) -> Counterfactual:
        """Widen the interval of a result from steps without these seconds: they are known only roughly."""
        step_s, baseline_s = found.step_s + self.seconds, found.baseline_step_s + self.seconds

        def changes(watching_s: float) -> float:
            least_s = (1 - MOST_WATCHING) * step_s
            return (baseline_s - watching_s) / max(step_s - watching_s, least_s) / found.speedup

        ends = [changes(self.low_s), changes(self.high_s), 1.0]
        return replace(
            found,
            speedup_low=found.speedup_low * min(ends),
            speedup_high=found.speedup_high * max(ends),
        )


def watching(rows: Sequence[StepRow]) -> Watching:
    """Compare steps with and without notes; nothing is known if they may take equally long."""
    of_both = [row for row in rows if row.arm in (REAL, UNWATCHED)]
    found = compare(build_steps(of_both), label=UNWATCHED, baseline=REAL)
    if found is None or found.speedup_low <= 1:
        return Watching()

    def seconds(speedup: float) -> float:
        return found.baseline_step_s * (1 - 1 / speedup)

    return Watching(seconds(found.speedup), seconds(found.speedup_low), seconds(found.speedup_high))


def build_steps(rows: Sequence[StepRow], *, watching_s: float = 0.0) -> tuple[Step, ...]:
    """Read the GPU's clock for all rows; mark steps that must not enter a mean as not kept.

    `watching_s` is taken off each step, and off its phases in proportion.
    """
    # if epochs last only a step or two, their starts are part of a step's cost
    starts_count = sum(row.epoch_start for row in rows) * 2 > len(rows)
    steps = []
    for row in rows:
        on_device = read_marks(row.marks)
        part = 1.0
        if on_device is None and row.arm not in AS_THEY_ARE and row.host_s > 0:
            part = 1 - min(watching_s / row.host_s, MOST_WATCHING)
        steps.append(
            Step(
                index=row.index,
                arm=row.arm,
                block=row.block,
                step_s=on_device[0] if on_device is not None else part * row.host_s,
                phases_s={phase: part * seconds for phase, seconds in phases_s(row.totals).items()},
                device_phases_s=on_device[1] if on_device is not None else None,
                rows=row.rows,
                num_batches=row.num_batches,
                num_backwards=row.num_backwards,
                num_forwards=row.num_forwards,
                epoch_start=row.epoch_start,
                kept=not row.transition and not row.apart and (starts_count or not row.epoch_start),
            )
        )
    apart = outliers([step for step in steps if step.kept and step.arm not in ("warmup", *INSTRUMENTS)])
    return tuple(replace(step, kept=False) if step.kept and step.index in apart else step for step in steps)
