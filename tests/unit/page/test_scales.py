"""Axes: every value has its place, ticks are few and round, and levels can be told apart."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from flatout.ground.units import show_bytes
from flatout.page.scales import (
    Scale,
    binary_unit,
    log_scale,
    round_scale,
    round_step,
    round_ticks,
    show_value,
    span_scale,
    step_scale,
    time_scale,
    zero_scale,
)

GIB = 2**30


def shown(scale: Scale) -> list[str]:
    return [text for _, text in scale.ticks]


@given(st.floats(-1e30, 1e30), st.floats(0, 1e30), st.floats(-1e30, 1e30))
def test_every_value_has_a_place_on_the_axis(low: float, span: float, value: float) -> None:
    assert 0 <= span_scale(low, low + span).share(value) <= 1


def test_ends_and_what_lies_between() -> None:
    scale = Scale(low=10.0, high=20.0)
    assert [scale.share(value) for value in (0, 10, 15, 20, 99)] == [0, 0, 0.5, 1, 1]
    assert Scale(low=1.0, high=1.0).share(1.0) == 0


@given(st.floats(min_value=1e-7, max_value=1e5))
def test_ticks_are_few_round_and_inside_the_scale(top: float) -> None:
    ticks = round_ticks(top)
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 7
    assert ticks[-1] <= top * (1 + 1e-9)
    assert f"{ticks[1]:e}"[0] in "125"


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_round_scales_hold_their_range(low: float, length: float) -> None:
    found = round_scale(low, low + length)
    assert 2 <= len(found.ticks) <= 8
    slack = 1e-6 * (found.high - found.low)
    assert found.low - slack <= low and low + length <= found.high + slack


@pytest.mark.parametrize(
    ("wanted", "step"), [(0.3, 0.5), (1.0, 1.0), (1.1, 2.0), (7.0, 10.0), (0.002, 0.002)]
)
def test_steps_are_round(wanted: float, step: float) -> None:
    assert round_step(wanted) == pytest.approx(step)


def test_bytes_have_round_marks() -> None:
    scale = zero_scale(61.8 * GIB, show_bytes, unit=binary_unit(61.8 * GIB))
    assert shown(scale) == ["0 B", "20.0 GiB", "40.0 GiB", "60.0 GiB"]


@given(st.floats(-1e4, 1e4), st.floats(1e-4, 1e4))
def test_levels_of_an_axis_can_be_told_apart(low: float, span: float) -> None:
    assert len(set(shown(span_scale(low, low + span)))) == 3


@given(st.floats(0, 200), st.floats(0.02, 1000))
def test_levels_of_losses_and_points_fit_beside_the_axis(low: float, span: float) -> None:
    assert max(map(len, shown(span_scale(low, low + span)))) <= 7  # of 11 pixels' type in 58 pixels


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0])
def test_values_that_are_all_alike_lie_in_the_middle(value: float) -> None:
    assert span_scale(value, value).share(value) == pytest.approx(0.5)


def test_a_scale_of_nothing_but_zeros_can_be_drawn() -> None:
    assert zero_scale(0.0, "{:g}".format).share(0.0) == 0


def test_logarithmic_scales_hold_zero_and_what_is_below_it() -> None:
    scale = log_scale(-0.001, 2.0, bend=1e-4)
    shares = [scale.share(value) for value in (-0.001, 0.0, 1e-4, 1e-2, 1.0, 2.0)]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
    assert math.isclose(
        scale.share(1.0) - scale.share(0.1), scale.share(0.1) - scale.share(0.01), rel_tol=0.01
    )
    assert "0" in shown(scale) and "1" in shown(scale)


def test_steps_and_times_are_marked_at_their_ends() -> None:
    assert shown(step_scale(0, 12_000)) == ["0", "12,000 steps"]
    assert shown(time_scale(420.0)) == ["0:00", "1:45", "3:30", "5:15", "7:00"]
    assert time_scale(0.0).share(0.0) == 0


def test_values_are_short() -> None:
    assert [show_value(value) for value in (0.0, 0.00012, 0.0466, 1.234, 61.55)] == [
        "0", "1e-04", "0.0466", "1.23", "61.5",
    ]  # fmt: skip
