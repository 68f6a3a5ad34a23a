"""Charts: gaps stay gaps, limits do not flatten, marks lie in their box, columns say their values."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from flatout.ground.units import show_bytes, show_share, show_time
from flatout.page.charts import (
    MOST_POINTS,
    PAD,
    Axes,
    Column,
    Curve,
    Drawing,
    Mark,
    RowChart,
    columns,
    curves,
    scatter,
    stack,
    stacked_row,
    thin_points,
)
from flatout.page.scales import Scale, round_scale, span_scale, time_scale, zero_scale

GIB = 2.0**30
SHARES = Scale(low=0.0, high=1.0)


def series(*values: float | None, name: str = "line", colour: str = "forward") -> Curve:
    return Curve(name=name, colour=colour, points=[(float(i), value) for i, value in enumerate(values)])


def axes(up: Scale | None = None) -> Axes:
    return Axes(across=time_scale(10.0), up=up or zero_scale(1.0, show_share))


def lines_of(chart: Drawing | None, colour: str = "forward") -> list[Mark]:
    assert chart is not None
    return [mark for mark in chart.marks if mark.shape == "line" and mark.colour == colour]


def test_an_unknown_value_is_a_gap() -> None:
    values = series(0.5, 0.6, None, 0.7, 0.8)
    assert len(lines_of(curves([values], axes(), has_gaps=True))) == 2
    assert len(lines_of(curves([values], axes()))) == 1


def test_a_silence_is_a_gap_too() -> None:
    points = [(0.0, 0.5), (1.0, 0.5), (2.0, 0.5), (9.0, 0.5), (10.0, 0.5)]
    line = Curve(name="line", colour="forward", points=points)
    assert len(lines_of(curves([line], axes(), has_gaps=True))) == 2


def test_a_value_alone_is_seen() -> None:
    for has_gaps in (True, False):
        (line,) = lines_of(curves([series(None, 0.5, None)], axes(), has_gaps=has_gaps))
        assert line.at[1][0] > line.at[0][0]


def test_columns_say_what_stands_above_them() -> None:
    lines = [series(0.25, 0.5), series(1.0, None, name="other")]
    drawn = curves(lines, axes(), show=show_share, show_across=show_time)
    assert drawn is not None
    titles = [mark.title for mark in drawn.marks if mark.shape == "hover"]
    assert titles == ["0:00  line 25 %, other 100 %", "0:01  line 50 %"]


def test_a_limit_beyond_the_axis_is_named_not_drawn() -> None:
    for limit, num in ((80.0, 1), (800.0, 0)):
        up = zero_scale(80.0 * GIB, show_bytes)
        drawn = curves([series(60.0 * GIB)], axes(up), show=show_bytes, limit=("capacity", limit * GIB))
        assert len(lines_of(drawn, "accent")) == num
        assert drawn is not None and drawn.legend[-1].name == f"capacity {show_bytes(limit * GIB)}"


def test_lines_without_points_are_left_out() -> None:
    assert curves([series()], axes()) is None
    drawn = curves([series(1.0, 0.5), series(None, name="held out")], axes(), shows_last=True)
    assert drawn is not None and [key.name for key in drawn.legend] == ["line"]
    assert drawn.legend[0].value == "0.5"


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.floats(-1e30, 1e30)),
        min_size=1,
        max_size=50,
        unique_by=lambda point: point[0],
    )
)
def test_every_corner_lies_in_the_box(points: list[tuple[int, float]]) -> None:
    steps, values = zip(*sorted(points), strict=True)
    box = Axes(across=span_scale(0, max(1, *steps)), up=span_scale(min(values), max(values)))
    (line,) = lines_of(curves([Curve(name="loss", colour="forward", points=sorted(points))], box))
    assert len(line.at) >= 2  # a point alone is seen as well
    for x, y in line.at:
        assert 0 <= x <= 1 and PAD <= y <= PAD + box.height


@pytest.mark.parametrize("values", [(0.0, 0.0), (5.0, 5.0), (float("nan"), 1.0), (-3.0, -3.0)])
def test_flat_and_odd_curves_are_drawn(values: tuple[float, ...]) -> None:
    known = [value for value in values if value == value]
    for up in (zero_scale(max(known), show_share), span_scale(min(known), max(known))):
        for line in lines_of(curves([series(*values)], axes(up), has_gaps=True)):
            assert all(x == x and y == y for x, y in line.at)


def test_long_lines_are_thinned_and_keep_their_end_and_mean() -> None:
    points = [(float(step), float(step % 7)) for step in range(10_000)]
    few = thin_points(points, size=25)
    assert len(few) == MOST_POINTS and few[-1][0] == 9_999
    assert abs(sum(value for _, value in few) / len(few) - 3) < 0.05
    assert thin_points(points[:400], size=1) == points[:400]
    box = Axes(across=span_scale(0, 9_999), up=span_scale(0, 6))
    (line,) = lines_of(curves([Curve(name="loss", colour="forward", points=points)], box))
    assert len(line.at) == MOST_POINTS


def layers(points: list[tuple[float, dict[str, float]]]) -> list[Curve]:
    names = dict.fromkeys(name for _, shares in points for name in shares)
    return [
        Curve(name=name, colour=name, points=[(x, shares.get(name)) for x, shares in points])
        for name in names
    ]


def test_areas_are_stacked_to_the_whole() -> None:
    points = [(float(i), {"wait": 0.25, "rest": 0.75}) for i in range(4)]
    drawn = stack(layers(points), Axes(across=time_scale(3.0), up=SHARES), label="shares")
    areas = {mark.colour: mark.at for mark in drawn.marks if mark.shape == "area"}
    assert set(areas) == {"wait", "rest"} == {key.name for key in drawn.legend}
    heights = [y for shape in areas.values() for _, y in shape]
    assert (min(heights), max(heights)) == (PAD, PAD + 130)


def test_a_silence_splits_the_areas_and_a_stair_has_none() -> None:
    points = [(second, {"rest": 1.0}) for second in (0.0, 1.0, 2.0, 8.0)]
    box = Axes(across=time_scale(8.0), up=SHARES)
    for is_stair, num in ((False, 2), (True, 1)):
        drawn = stack(layers(points), box, label="shares", is_stair=is_stair)
        assert sum(mark.shape == "area" for mark in drawn.marks) == num


def test_a_stair_stays_until_the_next_point() -> None:
    line = Curve(name="bytes", colour="wait", points=[(0.0, 1.0), (1.0, 0.5)])
    drawn = stack([line], Axes(across=span_scale(0, 1), up=SHARES), label="", is_stair=True)
    (area,) = (mark for mark in drawn.marks if mark.shape == "area")
    assert area.at[:3] == ((0.0, PAD), (1.0, PAD), (1.0, PAD + 65))


def test_columns_are_as_high_as_their_parts_and_cut_off_beyond_the_axis() -> None:
    bars = [
        Column(left=0, right=1, parts=[("wait", 0.25), ("rest", 0.5)], title="one", is_pale=True),
        Column(left=1, right=2, parts=[("rest", 3.0)]),
    ]
    drawn = columns(bars, Axes(across=Scale(low=0, high=2), up=SHARES), label="two")
    rects = [mark for mark in drawn.marks if mark.shape == "rect"]
    assert [mark.colour for mark in rects] == ["wait", "rest", "rest", "paper"]
    assert [mark.at[1][1] - mark.at[0][1] for mark in rects[:3]] == pytest.approx([32.5, 65, 130])
    assert [mark.opacity for mark in rects[:3]] == [0.4, 0.4, 1.0] and rects[0].title == "one"


def test_dots_lie_where_both_axes_say() -> None:
    box = Axes(across=round_scale(0, 10), up=round_scale(0, 1))
    drawn = scatter([Mark(shape="dot", at=((5.0, 1.0),))], box, label="one")
    assert drawn.marks[-1].at == ((0.5, PAD),)


def test_marks_of_a_row_lie_at_their_values() -> None:
    chart = RowChart(across=Scale(low=0.0, high=2.0), height=40)
    assert chart.dot(0.5, "ink").at == ((0.25, 20),)
    line, low, high = chart.interval(0.5, 1.0, "ink")
    assert line.at == ((0.25, 20), (0.5, 20)) and low.at[0][0] == 0.25 and high.at[0][0] == 0.5
    assert chart.bar(0, 1, "ink", lane=(0.5, 1)).at == ((0, 20), (0.5, 40))
    assert chart.rule(1.0).at == ((0.5, 0), (0.5, 40))
    assert chart.dot(99, "ink").at[0][0] == 1  # what is beyond the scale stays on it


@given(st.dictionaries(st.sampled_from(["wait", "forward", "rest"]), st.floats(0, 1 / 3)))
def test_a_stacked_row_fills_what_its_parts_account_for(shares: dict[str, float]) -> None:
    row = stacked_row("host", shares)
    widths = [mark.at[1][0] - mark.at[0][0] for mark in row.marks]
    assert sum(widths) == pytest.approx(sum(shares.values()))
    assert [mark.at[0][0] for mark in row.marks[1:]] == [mark.at[1][0] for mark in row.marks[:-1]]
    assert all(f"{part} {show_share(share)}" in row.label for part, share in shares.items())
