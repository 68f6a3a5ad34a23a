"""Charts in a page: every mark is an element, well formed, and text can only be text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from flatout.ground.units import show_share, show_time
from flatout.page.charts import (
    Axes,
    Cell,
    Chart,
    ChartRow,
    Curve,
    Key,
    Mark,
    Matrix,
    RowChart,
    curves,
    scatter,
    stack,
)
from flatout.page.inline import inline, legend, svg_mark
from flatout.page.scales import Scale, round_scale, time_scale, zero_scale

HOSTILE = "</svg><script>alert(1)</script>\x1b"
BOX = Axes(across=time_scale(10.0), up=zero_scale(1.0, show_share), name_across=HOSTILE)
LINE = Curve(name=HOSTILE, colour="forward", points=[(0.0, 0.5), (5.0, 0.7), (10.0, None)])


def all_charts() -> list[Chart]:
    lines = curves([LINE, LINE], BOX, show_across=show_time, limit=(HOSTILE, 0.9), shows_last=True)
    assert lines is not None
    rows = RowChart(across=round_scale(0, 1))
    marks = (rows.track(), rows.dot(0.5, "ink", title=HOSTILE, hollow=True), *rows.interval(0.2, 0.7, "up"))
    cell = Cell(text=HOSTILE, title=HOSTILE, strength=0.5, is_outlined=True)
    return [
        lines,
        stack([LINE], BOX, label=HOSTILE),
        scatter([Mark(shape="dot", at=((5.0, 0.5),), title=HOSTILE)], BOX, label=HOSTILE),
        RowChart(
            rows=(
                ChartRow(name=HOSTILE, marks=marks, label=HOSTILE, figure=HOSTILE),
                ChartRow(name=HOSTILE, marks=marks, label=HOSTILE, figure=HOSTILE, note=HOSTILE),
            ),
            across=rows.across,
            legend=(Key(name=HOSTILE, colour="up", kind="ring"),),
        ),
        Matrix(label=HOSTILE, rows=(HOSTILE,), columns=(HOSTILE,), cells=((cell,),), corner=HOSTILE),
        Matrix(label=HOSTILE, rows=("1",), edges=("0", "1", "2"), cells=((cell, None),), name_across=HOSTILE),
    ]


@pytest.mark.parametrize("chart", all_charts(), ids=lambda chart: type(chart).__name__)
def test_charts_are_well_formed_and_names_are_text(chart: Chart) -> None:
    html = inline(chart)
    root = ElementTree.fromstring(html)
    assert not list(root.iter("script"))
    assert "alert(1)" in "".join(root.itertext()) and "\x1b" not in html


def test_every_drawing_is_described_and_its_axes_are_not_read_out() -> None:
    drawn = curves([LINE], BOX)
    assert drawn is not None
    pictures = [
        svg for svg in ElementTree.fromstring(inline(drawn)).iter("svg") if "viewBox" not in svg.attrib
    ]
    described = [svg for svg in pictures if svg.get("role") == "img"]
    assert [svg.get("aria-label", "").replace("\ufffd", "\x1b") for svg in described] == [drawn.label]
    assert all(svg.get("aria-hidden") == "true" for svg in pictures if svg not in described)


def test_colours_follow_the_reader_s_theme() -> None:
    mark = Mark(shape="rect", at=((0.0, 0.0), (0.5, 10.0)), colour="wait")
    html = inline(RowChart(rows=(ChartRow(name="a", marks=(mark,), label="a"),)))
    assert 'fill="var(--wait)"' in html and 'width="50.000%"' in html


def test_a_pointer_is_told_the_title_of_a_mark() -> None:
    made = svg_mark(Mark(shape="dot", at=((0.25, 4),), title="a dot"), across=str, paint=str)
    assert made == '<circle cx="0.25" cy="4" r="1" fill="ink"><title>a dot</title></circle>'


def test_colour_grows_with_the_value_and_nothing_has_none() -> None:
    cells = tuple(Cell(text=str(value), strength=value) for value in (0.0, 0.2, 0.9))
    drawn = inline(Matrix(label="", rows=("row",), columns=("a", "b", "c"), cells=(cells,)))
    amounts = [int(found) for found in re.findall(r"--amount: (\d+)%", drawn)]
    assert len(amounts) == 2 and amounts[0] < amounts[1]


def test_numbers_of_edges_stand_on_every_border() -> None:
    chart = Matrix(label="", rows=("1",), edges=("-1", "0", "1"), cells=((None, None),))
    assert re.findall(r"<(?:span|em)>([^<]*)<", inline(chart)) == ["-1", "0", "1"]


def test_a_legend_of_nothing_is_nothing() -> None:
    assert legend(()) == ""
    assert "<b>0.5</b>" in legend([Key(name="loss", colour="rest", value="0.5")])


def test_words_at_the_ends_of_an_axis_stay_inside() -> None:
    drawn = curves([LINE], Axes(across=time_scale(10.0), up=Scale(low=0.0, high=1.0)))
    assert drawn is not None
    assert re.findall(r'text-anchor="(\w+)"', inline(drawn)) == ["start", "middle", "middle", "middle", "end"]
