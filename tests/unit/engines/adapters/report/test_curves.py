"""Curves: points at their steps, gaps bridged, and heavy logs made light."""

from __future__ import annotations

import math
import re

from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.adapters.report.curves import (
    HEIGHT,
    PAD,
    WIDTH,
    Line,
    curve,
    loss_line,
    routing_line,
    show_value,
    thinned,
    validation_line,
)
from flatout.engines.adapters.training.log import StepRecord


def test_lines_hold_what_is_known() -> None:
    records = [
        StepRecord(phase="phase1", step=1, losses={"qa": 2.0}),
        StepRecord(phase="phase1", step=2, losses={"qa": None}, validation={"qa": {"f1": 40.0}}),
        StepRecord(phase="phase1", step=3, losses={"qa": math.inf}, routing={"accuracy": 0.5}),
    ]
    assert loss_line(records, "qa", name="loss").points == ((1, 2.0),)
    assert validation_line(records, "qa", "f1", name="f1").points == ((2, 40.0),)
    assert routing_line(records, "accuracy", name="accuracy").points == ((3, 0.5),)
    assert loss_line(records, "code", name="loss").points == ()


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.floats(-1e30, 1e30)),
        min_size=1,
        max_size=50,
        unique_by=lambda p: p[0],
    )
)
def test_every_corner_lies_in_the_box(points: list[tuple[int, float]]) -> None:
    drawn = curve([Line(name="loss", colour="first", points=tuple(sorted(points)))])
    assert drawn is not None
    (corners,) = re.findall(r'<polyline points="([^"]*)"', drawn)
    for corner in corners.split():
        x, y = map(float, corner.split(","))
        assert -0.1 <= x <= WIDTH + 0.1 and PAD - 0.1 <= y <= PAD + HEIGHT + 0.1
    assert len(corners.split()) >= 2  # a point alone is seen as well


def test_lines_without_points_are_left_out() -> None:
    assert curve([Line(name="loss", colour="first", points=())]) is None
    drawn = curve(
        [
            Line(name="loss", colour="first", points=((1, 1.0), (2, 0.5))),
            Line(name="held out", colour="second", points=()),
        ]
    )
    assert drawn is not None and drawn.count("<polyline") == 1 and "held out" not in drawn


def test_long_lines_are_thinned_and_keep_their_end_and_mean() -> None:
    points = tuple((step, float(step % 7)) for step in range(10_000))
    few = thinned(points)
    assert len(few) <= 400 and few[-1][0] == 9_999
    assert abs(sum(value for _, value in few) / len(few) - 3) < 0.05
    assert thinned(points[:400]) == points[:400]


def test_values_are_short() -> None:
    assert [show_value(value) for value in (0.0, 0.00012, 0.0466, 1.234, 61.55)] == [
        "0", "1e-04", "0.0466", "1.23", "61.5",
    ]  # fmt: skip


def levels(low: float, span: float) -> list[str]:
    drawn = curve([Line(name="loss", colour="first", points=((1, low), (2, low + span)))])
    assert drawn is not None
    return re.findall(r'<text x="46"[^>]*>([^<]*)</text>', drawn)


@given(st.floats(-1e4, 1e4), st.floats(1e-4, 1e4))
def test_levels_of_an_axis_can_be_told_apart(low: float, span: float) -> None:
    assert len(set(levels(low, span))) == 3


@given(st.floats(0, 200), st.floats(0.02, 1000))
def test_levels_of_losses_and_points_fit_beside_the_axis(low: float, span: float) -> None:
    assert max(map(len, levels(low, span))) <= 7  # of 11 pixels' type in 46 pixels
