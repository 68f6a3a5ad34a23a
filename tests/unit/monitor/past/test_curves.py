"""Drawings over time: gaps stay gaps, limits do not flatten, every column says its values."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from flatout.monitor.past.curves import Series, chart, show_time, stacked_phases, strip
from flatout.monitor.past.recorded import Stretch
from flatout.monitor.verdicts.window import Verdict
from flatout.units import show_bytes, show_share

GIB = 2**30


def series(*values: float | None, name: str = "line", colour: str = "first") -> Series:
    return Series(name=name, colour=colour, points=[(float(i), value) for i, value in enumerate(values)])


def drawn(*lines: Series, **options: object) -> ElementTree.Element:
    html = chart(lines, span_s=10.0, **{"show": show_share, **options})  # type: ignore[arg-type]
    return ElementTree.fromstring(html)


def lines_of(root: ElementTree.Element) -> list[str]:
    return [line.get("points", "") for line in root.iter("polyline")]


def axis(root: ElementTree.Element) -> list[str]:
    (drawing,) = (
        each for each in root.iter("svg") if each.get("class") == "axis" and each.get("width") == "62"
    )
    return [text.text or "" for text in drawing.iter("text")]


def test_an_unknown_value_is_a_gap() -> None:
    root = drawn(series(0.5, 0.6, None, 0.7, 0.8))
    assert len(lines_of(root)) == 2


def test_a_silence_is_a_gap_too() -> None:
    points = [(0.0, 0.5), (1.0, 0.5), (2.0, 0.5), (9.0, 0.5), (10.0, 0.5)]
    root = drawn(Series(name="line", colour="first", points=points))
    assert len(lines_of(root)) == 2


def test_a_value_alone_is_seen() -> None:
    (line,) = lines_of(drawn(series(None, 0.5, None)))
    left, right = re.findall(r"([\d.]+),", line)
    assert float(right) > float(left)


def test_columns_say_what_stands_above_them() -> None:
    root = drawn(series(0.25, 0.5), series(1.0, None, name="other", colour="second"))
    titles = [title.text for title in root.iter("title")]
    assert titles == ["0:00  line 25 %, other 100 %", "0:01  line 50 %"]


def test_a_level_far_above_is_named_not_drawn() -> None:
    near = drawn(series(60.0 * GIB), show=show_bytes, limit=("capacity", 80.0 * GIB))
    far = drawn(series(60.0 * GIB), show=show_bytes, limit=("capacity", 800.0 * GIB))
    for root, num in ((near, 1), (far, 0)):
        assert sum(line.get("class") == "limit" for line in root.iter("line")) == num
        assert "capacity" in "".join(root.itertext())


def test_bytes_have_round_marks() -> None:
    assert axis(drawn(series(61.8 * GIB), show=show_bytes, binary=True)) == [
        "0 B", "20.0 GiB", "40.0 GiB", "60.0 GiB"
    ]  # fmt: skip


@pytest.mark.parametrize("values", [(0.0, 0.0), (5.0, 5.0), (float("nan"), 1.0), (-3.0, -3.0)])
@pytest.mark.parametrize("from_zero", [True, False])
def test_flat_and_odd_curves_are_drawn(values: tuple[float, ...], from_zero: bool) -> None:
    root = drawn(series(*values), from_zero=from_zero)
    numbers = [float(n) for line in lines_of(root) for n in re.findall(r"-?[\d.]+", line)]
    assert numbers and all(n == n for n in numbers)


def test_names_are_escaped() -> None:
    html = chart([series(0.5, name="<script>")], span_s=1.0, show=show_share, limit=("<b>", 1.0))
    assert "<script>" not in html and "<b>" not in html


def test_phases_are_stacked_to_the_whole() -> None:
    points = [(float(i), {"wait": 0.25, "rest": 0.75}) for i in range(4)]
    root = ElementTree.fromstring(stacked_phases(points, span_s=3.0, label="shares"))
    polygons = {each.get("class"): each.get("points", "") for each in root.iter("polygon")}
    assert set(polygons) == {"wait", "rest"}
    heights = [float(y) for shape in polygons.values() for y in re.findall(r",([\d.]+)", shape)]
    assert (min(heights), max(heights)) == (8.0, 138.0)


def test_a_silence_splits_the_phases() -> None:
    points = [(second, {"rest": 1.0}) for second in (0.0, 1.0, 2.0, 8.0)]
    root = ElementTree.fromstring(stacked_phases(points, span_s=8.0, label="shares"))
    assert len(list(root.iter("polygon"))) == 2


def test_the_strip_has_a_cell_per_stretch() -> None:
    verdict = Verdict(bound="data", sentence="the loader is <slow>", action="look")
    stretches = [
        Stretch(start_s=0.0, end_s=10.0, verdict=verdict),
        Stretch(start_s=10.0, end_s=20.0, verdict=None),
    ]
    root = ElementTree.fromstring(strip(stretches, start_s=0.0, span_s=20.0))
    assert [cell.get("class") for cell in root.iter("rect")] == ["bound-data", "bound-unknown"]
    assert [cell.get("width") for cell in root.iter("rect")] == ["500", "500"]
    assert "0:00: data: the loader is <slow>" in [title.text for title in root.iter("title")]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (42.4, "0:42"), (725, "12:05"), (12000, "3:20:00"), (187200, "2 d 4 h"), (-1, "0:00")],
)
def test_times(seconds: float, shown: str) -> None:
    assert show_time(seconds) == shown
