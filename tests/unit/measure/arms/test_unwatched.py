from __future__ import annotations

from typing import Any

import pytest

from flatout.measure.arms.unwatched import propose


@pytest.mark.parametrize(
    ("step_s", "device", "found"),
    [(0.0002, "cpu", [0.25]), (0.00002, "cpu", [1.0]), (0.01, "cpu", []), (0.0002, "cuda", [])],
)
def test_only_short_steps_by_the_clock_of_the_host_are_tried(
    context: Any, step_s: float, device: str, found: list[float]
) -> None:
    arms = list(propose(context(step_s=step_s, device=device)))
    assert [arm.suspicion for arm in arms] == pytest.approx(found)
    assert all(arm.is_internal for arm in arms)
