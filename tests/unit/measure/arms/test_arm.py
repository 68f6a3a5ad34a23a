from __future__ import annotations

from flatout.measure.arms.arm import REAL, Same


def test_the_arm_of_nothing_is_compared_with_real_steps() -> None:
    same = Same()
    assert (same.kind, same.label, same.baseline, same.refusal) == ("same", "same", REAL, None)
    for act in (same.begin, same.step_end, same.end, same.release):
        act()
    assert list(same.refine()) == []
