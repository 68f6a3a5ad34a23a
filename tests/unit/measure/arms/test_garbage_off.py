from __future__ import annotations

import gc
from typing import Any

from flatout.measure.arms.garbage_off import propose


def test_steps_with_pauses_are_tried_without(context: Any) -> None:
    made = context(step_s=1.0)
    made.process.garbage.pauses_s = [0.2, 0.2, 0.2]
    (arm,) = propose(made)
    assert arm.refusal is None and gc.isenabled()
    arm.begin()
    assert not gc.isenabled() and made.process.garbage.stopped
    arm.end()
    assert gc.isenabled() and not made.process.garbage.stopped


def test_rare_pauses_are_named_and_short_ones_left_alone(context: Any) -> None:
    made = context(step_s=1.0)
    made.process.garbage.pauses_s = [0.0] * 9 + [2.0]
    (arm,) = propose(made)
    assert arm.refusal == "pauses are in 1 of 10 steps, too rare for blocks of steps"
    made.process.garbage.pauses_s = [0.01] * 10
    assert list(propose(made)) == []
    made.process.garbage.pauses_s = []
    assert list(propose(made)) == []
