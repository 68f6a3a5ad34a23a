"""Steps of which only the end is noted: what the notes on every other step cost.

Between two steps Flatout adds up clocks and counters.  No step includes that work, but it drives the job's
own code and data out of the processor's caches, and the next step fetches them again: up to 6 % of a step of
0.25 ms.  What ordinary steps take beyond these is taken off every step and every arm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flatout.measure.arms.arm import UNWATCHED, Arm, ArmContext

USUAL_S = 5e-5  # what the notes on a step may cost
LEAST_SHARE = 0.01  # of the step


class StepEnd(NamedTuple):
    """What is noted of a step in such a block; totals are of the block so far, counts of the whole run."""

    time_s: float
    totals: list[float]
    num_batches: int
    num_forwards: int
    num_backwards: int
    epoch_start: bool = False
    begins_epoch: bool = False


class Unwatched(Arm):
    """Unchanged steps without notes."""

    kind = label = UNWATCHED
    is_internal = True
    fewest_rounds = 4

    def __init__(self, *, suspicion: float) -> None:
        self.suspicion = suspicion


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose the arm if steps are short; a GPU's clock leaves out what the host does between steps."""
    share = USUAL_S / context.step_s
    if context.device == "cpu" and share >= LEAST_SHARE:
        yield Unwatched(suspicion=min(1.0, share))
