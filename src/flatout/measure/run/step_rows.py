"""The recorded steps, before and after the GPU's clock is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.measure.arms.arm import REAL
from flatout.measure.clock import EXCLUDED, phases_s, read_marks
from flatout.measure.evidence import INSTRUMENTS, Step
from flatout.measure.statistics import FEWEST_STEPS, outliers

MOST_STEPS = 2 / 3  # for a number of model calls to be the usual one


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


def build_steps(rows: Sequence[StepRow]) -> tuple[Step, ...]:
    """Read the GPU's clock for all rows; mark steps that must not enter a mean as not kept."""
    # if epochs last only a step or two, their starts are part of a step's cost
    starts_count = sum(row.epoch_start for row in rows) * 2 > len(rows)
    steps = []
    for row in rows:
        on_device = read_marks(row.marks)
        steps.append(
            Step(
                index=row.index,
                arm=row.arm,
                block=row.block,
                step_s=on_device[0] if on_device is not None else row.host_s,
                phases_s=phases_s(row.totals),
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
