"""Steps without Python's garbage collector, explicit `gc.collect()` calls included.

A few steps leave little garbage, and the next real step, which is never timed, collects it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.evidence import Place
from flatout.measure.process.garbage import GarbageWatch, num_paused

LEAST_SHARE = 0.03  # of the step
OFTEN = 0.5  # of the steps: rarer pauses hit some blocks and miss others


class GarbageOff(Arm):
    """No collections."""

    kind = label = "garbage-off"

    def __init__(self, watch: GarbageWatch, *, suspicion: float, place: Place | None = None) -> None:
        self.suspicion, self.place = suspicion, place
        self._watch, self._collects = watch, False

    def begin(self) -> None:
        self._watch.stopped, self._collects = True, gc.isenabled()
        gc.disable()

    def end(self) -> None:
        self._watch.stopped = False
        if self._collects:
            gc.enable()

    def release(self) -> None:
        self.end()


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose the arm if pauses take a noticeable share of the step."""
    watch = context.process.garbage
    pauses_s = sum(watch.pauses_s)
    if not pauses_s:
        return
    share = min(1.0, pauses_s / len(watch.pauses_s) / context.step_s)
    if share < LEAST_SHARE:
        return
    arm, paused = GarbageOff(watch, suspicion=share, place=watch.place), num_paused(watch.pauses_s)
    if paused < OFTEN * len(watch.pauses_s):
        arm.refusal = f"pauses are in {paused} of {len(watch.pauses_s)} steps, too rare for blocks of steps"
    yield arm
