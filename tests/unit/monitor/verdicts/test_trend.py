"""A rise that will end in an out-of-memory, told from what only looks like one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor.verdicts.trend import rising


def test_a_steady_rise_has_its_slope() -> None:
    rise = rising([(float(t), 100.0 + 3.0 * t) for t in range(40)], least=10)
    assert rise is not None
    assert (rise.bytes_per_s, rise.span_s) == (3.0, 39.0)


@given(
    slope=st.floats(1, 1e9),
    noise=st.lists(st.floats(-0.4, 0.4), min_size=40, max_size=40),
)
def test_noise_below_the_step_does_not_hide_a_rise(slope: float, noise: list[float]) -> None:
    rise = rising([(float(t), slope * (t + extra)) for t, extra in enumerate(noise)], least=slope)
    assert rise is not None
    assert rise.bytes_per_s == pytest.approx(slope, rel=0.1)


@pytest.mark.parametrize(
    "values",
    [
        [5.0] * 40,  # level
        [float(40 - t) for t in range(40)],  # falling
        [0.0] * 20 + [100.0] * 20,  # one jump
        [float(t % 2) * 50 for t in range(40)],  # up and down
        [min(t, 10) * 10.0 for t in range(40)],  # a warm-up that ended
        [None] * 40,
    ],
)
def test_what_is_no_rise(values: list[float | None]) -> None:
    assert rising([(float(t), value) for t, value in enumerate(values)], least=1) is None


def test_a_few_seconds_or_a_few_bytes_are_no_trend() -> None:
    assert rising([(t / 10, 100.0 * t) for t in range(40)], least=1) is None
    assert rising([(float(t), float(t)) for t in range(40)], least=1000) is None
    assert rising([(10.0 * t, float(t)) for t in range(7)], least=1) is None
