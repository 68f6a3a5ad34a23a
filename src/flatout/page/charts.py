"""The charts of every page and every figure file, laid out once.

A chart is data: a `Drawing` is a list of marks with the words around them, `RowChart` and `Matrix` hold rows
and cells.  Marks are placed in shares of the width across and in pixels down, so one drawing fills a
phone, a sheet of paper and a figure file while its text and its dots keep their size.  `inline` turns charts
into HTML, `figures` into PNG and SVG files.  Colours are names of tokens.css.

    curves     lines over steps or over time, with a limit
    stack      areas one upon the other
    columns    bars beside each other, each split into parts
    scatter    dots in two dimensions
    RowChart   bars, dots and intervals along one common axis, a row each
    Matrix     cells that are coloured by their value
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from flatout.ground.units import show_share
from flatout.page.scales import Scale, Show, show_value

Value = TypeVar("Value")
Point = tuple[float, float]

PAD = 8.0  # pixels above and below a drawing, so that a line at the edge keeps its thickness
MOST_POINTS = 400  # of one line; more cannot be seen and make a page heavy
MOST_TITLES = 75
SEPARATED_BY = 3.0  # usual distances between points; further apart is a gap


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One shape with its corners (a rect has two), each a share of the width across and pixels down."""

    shape: Literal["line", "area", "rect", "dot", "text", "hover"]
    at: tuple[Point, ...]
    colour: str = "ink"  # of tokens.css, or #rrggbb
    title: str = ""  # the tooltip
    size: float = 1.0  # thickness of a line, radius of a dot, height of a text
    opacity: float = 1.0
    dashed: bool = False
    hollow: bool = False  # an outline
    text: str = ""
    anchor: Literal["start", "middle", "end"] = "start"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One entry of a legend."""

    name: str
    colour: str
    kind: Literal["box", "dot", "ring", "dashes", "none"] = "box"
    value: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """Marks, and the words around them."""

    label: str  # the chart in words, for those who do not see it
    height: float
    marks: tuple[Mark, ...]
    levels: tuple[tuple[str, float], ...] = ()  # to the left: text, pixels down
    foot: tuple[tuple[str, float], ...] = ()  # below: text, share across
    legend: tuple[Key, ...] = ()
    name_across: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """Two axes, and the height of the drawing between them."""

    across: Scale
    up: Scale
    height: float = 130.0
    name_across: str = ""

    def place(self, x: float, y: float) -> Point:
        """Return where a pair of values lies."""
        return self.across.share(x), round(PAD + self.height * (1 - self.up.share(y)), 2)

    def level(self, value: float, colour: str = "line", *, dashed: bool = False) -> Mark:
        """Draw a line over the whole width at one value."""
        _, y = self.place(self.across.low, value)
        return Mark(shape="line", at=((0.0, y), (1.0, y)), colour=colour, dashed=dashed)

    def upright(self, value: float, *, title: str = "") -> Mark:
        """Draw a dashed line from top to bottom at one value."""
        at = (self.place(value, self.up.low), self.place(value, self.up.high))
        return Mark(shape="line", at=at, colour="soft", dashed=True, title=title)

    def drawing(self, marks: Iterable[Mark], *, label: str, legend: Iterable[Key] = ()) -> Drawing:
        """Draw marks over the lines of the vertical axis."""
        lines = [self.level(value) for value, _ in self.up.ticks]
        return Drawing(
            label=label,
            height=self.height + 2 * PAD,
            marks=(*lines, *marks),
            levels=tuple((text, self.place(self.across.low, value)[1]) for value, text in self.up.ticks),
            foot=foot_of(self.across),
            legend=tuple(legend),
            name_across=self.name_across,
        )


def foot_of(across: Scale) -> tuple[tuple[str, float], ...]:
    """Return the ticks of the horizontal axis: text and place."""
    return tuple((text, across.share(value)) for value, text in across.ticks)


# Lines and areas


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line: its name, colour and points (across, up); None is an unknown value."""

    name: str
    colour: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False

    @property
    def known(self) -> list[Point]:
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]


def curves(
    lines: Sequence[Curve],
    axes: Axes,
    *,
    show: Show = show_value,
    show_across: Show | None = None,
    limit: tuple[str, float] | None = None,
    has_gaps: bool = False,
    shows_last: bool = False,
) -> Drawing | None:
    """Draw lines over common axes; None if no line has a value.

    A `limit` beyond the axis is named and not drawn.  With `has_gaps`, an unknown value or a long silence
    interrupts a line; without, the line goes on to the next value.  With `show_across`, columns say what
    stands above them; with `shows_last`, the legend says where a line ends.
    """
    known = [line for line in lines if line.known]
    if not known:
        return None
    marks: list[Mark] = []
    keys = [
        Key(
            name=line.name,
            colour=line.colour,
            kind="dashes" if line.dashed else "box",
            value=show(line.known[-1][1]) if shows_last else "",
        )
        for line in known
    ]
    if limit is not None:
        name, value = limit
        is_drawn = axes.up.low <= value <= axes.up.high
        keys.append(Key(name=f"{name} {show(value)}", colour="accent", kind="dashes" if is_drawn else "none"))
        marks += [axes.level(value, "accent", dashed=True)] if is_drawn else []
    for line in known:
        runs = _runs(line.points) if has_gaps else [line.known]
        size = math.ceil(sum(map(len, runs)) / MOST_POINTS)
        marks += [
            _line_mark([axes.place(*point) for point in thin_points(run, size=size)], line) for run in runs
        ]
    if show_across is not None:
        marks += _hovers(known, axes, show=show, show_across=show_across)
    spoken = "; ".join(_describe_line(line, show) for line in known)
    return axes.drawing(marks, label=spoken, legend=keys if len(keys) > 1 or shows_last else ())


def thin_points(points: Sequence[Point], *, size: int) -> list[Point]:
    """Average each `size` neighbours, at the last of them."""
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(y / len(group) for _, y in group)) for group in groups]


def stack(layers: Sequence[Curve], axes: Axes, *, label: str, is_stair: bool = False) -> Drawing:
    """Draw stacked areas over points they share; a silence is a gap.

    The edge of a stair stays where it is until the next point.
    """
    rows = [
        (points[0][0], [y or 0.0 for _, y in points])
        for points in zip(*(layer.points for layer in layers), strict=True)
    ]
    marks: list[Mark] = []
    for run in [rows] if is_stair else _together(rows):
        xs = [x for x, _ in run]
        if len(run) == 1:  # a point alone is a column, or it would not be seen
            half = 0.0015 * (axes.across.high - axes.across.low)
            run, xs = run * 2, [xs[0] - half, xs[0] + half]
        base = [0.0] * len(run)
        for number, layer in enumerate(layers):
            over = [low + values[number] for low, (_, values) in zip(base, run, strict=True)]
            if over != base:
                edges = [list(map(axes.place, xs, side)) for side in (over, base)]
                top, bottom = map(_stair, edges) if is_stair else edges
                marks.append(Mark(shape="area", at=(*top, *reversed(bottom)), colour=layer.colour))
            base = over
    keys = [Key(name=layer.name, colour=layer.colour) for layer in layers if any(y for _, y in layer.points)]
    return axes.drawing(marks, label=label, legend=keys)


def _stair(edge: list[Point]) -> list[Point]:
    corners = (((right, y), (right, next_y)) for (_, y), (right, next_y) in itertools.pairwise(edge))
    return [edge[0], *itertools.chain.from_iterable(corners)]


# Columns and dots


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One bar between two places across, its parts from the ground up as (colour, height)."""

    left: float
    right: float
    parts: Sequence[tuple[str, float]]
    title: str = ""
    is_pale: bool = False


def columns(
    bars: Sequence[Column],
    axes: Axes,
    *,
    label: str,
    legend: Sequence[Key] = (),
    rules: Sequence[Mark] = (),
) -> Drawing:
    """Draw bars beside each other; one that is higher than the axis is cut off, and marked."""
    marks: list[Mark] = []
    for bar in bars:
        base = 0.0
        for colour, value in bar.parts:
            at = (axes.place(bar.left, base + value), axes.place(bar.right, base))
            base += value
            if at[0][1] < at[1][1]:
                opacity = 0.4 if bar.is_pale else 1.0
                marks.append(Mark(shape="rect", at=at, colour=colour, title=bar.title, opacity=opacity))
        if base > axes.up.high:
            left, right = axes.across.share(bar.left), axes.across.share(bar.right)
            marks.append(Mark(shape="rect", at=((left, PAD + 8), (right, PAD + 12)), colour="paper"))
    return axes.drawing((*marks, *rules), label=label, legend=legend)


def scatter(marks: Sequence[Mark], axes: Axes, *, label: str) -> Drawing:
    """Draw dots and lines whose corners are values of both axes."""
    placed = [replace(mark, at=tuple(axes.place(x, y) for x, y in mark.at)) for mark in marks]
    return axes.drawing(placed, label=label)


# Rows along one axis


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartRow:
    """One row: its name, the figure at its end, what is drawn in it, and that in words."""

    name: str
    marks: tuple[Mark, ...]
    label: str
    figure: str = ""
    note: str = ""  # a sentence below the name


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChart:
    """Rows over one axis; marks of a row are placed by `bar`, `dot`, `interval` and `rule`."""

    rows: tuple[ChartRow, ...] = ()
    across: Scale = field(default_factory=lambda: Scale(low=0.0, high=1.0))
    height: float = 28.0  # of one row
    legend: tuple[Key, ...] = ()
    kind: str = "rows"  # class of the whole: how the style sheet places names beside drawings

    def bar(self, low: float, high: float, colour: str, *, title: str = "", lane: Point = (0, 1)) -> Mark:
        """Draw a bar between two values, in a lane of the row's height."""
        left, right = self.across.share(low), self.across.share(high)
        at = ((left, lane[0] * self.height), (right, lane[1] * self.height))
        return Mark(shape="rect", at=at, colour=colour, title=title)

    def dot(
        self, value: float, colour: str, *, size: float = 5.0, title: str = "", hollow: bool = False
    ) -> Mark:
        at = ((self.across.share(value), self.height / 2),)
        return Mark(shape="dot", at=at, colour=colour, size=size, title=title, hollow=hollow)

    def interval(self, low: float, high: float, colour: str) -> list[Mark]:
        """Draw a line between two values, with a stop at each end."""
        left, right, middle = self.across.share(low), self.across.share(high), self.height / 2
        lines = [((left, middle), (right, middle))]
        lines += [((x, middle - 6), (x, middle + 6)) for x in (left, right)]
        return [Mark(shape="line", at=at, colour=colour, size=1.5) for at in lines]

    def rule(self, value: float, colour: str = "soft", *, dashed: bool = False) -> Mark:
        """Draw a line across the row at a value."""
        x = self.across.share(value)
        return Mark(shape="line", at=((x, 0.0), (x, self.height)), colour=colour, dashed=dashed)

    def track(self) -> Mark:
        """Draw the axis itself, behind everything else."""
        return Mark(shape="line", at=((0.0, self.height / 2), (1.0, self.height / 2)), colour="line")


def stacked_row(name: str, shares: Mapping[str, float]) -> ChartRow:
    """Draw one whole as one bar: each share in the colour of its name; the rest stays empty."""
    marks, left, chart = [], 0.0, RowChart()
    for part, share in shares.items():
        if share > 0:
            marks.append(chart.bar(left, left + share, part, title=f"{part}: {show_share(share)}"))
        left += share
    spoken = ", ".join(f"{part} {show_share(share)}" for part, share in shares.items())
    return ChartRow(name=name, marks=tuple(marks), label=f"{name}: {spoken}")


# Cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell: its text, its tooltip, its colour, and the strength of the colour, 0 to 1."""

    text: str
    title: str = ""
    colour: str = "own"
    strength: float = 0.0
    is_outlined: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """Cells in rows and columns; None is an empty one.  With `edges`, columns lie between those numbers."""

    label: str
    rows: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    columns: tuple[str, ...] = ()
    edges: tuple[str, ...] = ()
    corner: str = ""
    name_across: str = ""


Chart = Drawing | RowChart | Matrix


# Parts of curves


def _line_mark(corners: list[Point], line: Curve) -> Mark:
    if len(corners) == 1:  # a point alone is a short dash, or it would not be seen
        ((x, y),) = corners
        corners = [(max(x - 0.005, 0.0), y), (min(x + 0.005, 1.0), y)]
    return Mark(shape="line", at=tuple(corners), colour=line.colour, size=1.6, dashed=line.dashed)


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[Point]]:
    """Split points at unknown values and at long silences."""
    gap = math.nan  # an unknown value, as a number
    numbers = [(x, gap if y is None else y) for x, y in points]
    return [
        list(run)
        for group in _together(numbers)
        for is_known, run in itertools.groupby(group, key=lambda point: math.isfinite(point[1]))
        if is_known
    ]


def _together(points: Sequence[tuple[float, Value]]) -> list[list[tuple[float, Value]]]:
    """Split points at long silences."""
    steps = sorted(later[0] - earlier[0] for earlier, later in itertools.pairwise(points))
    longest = SEPARATED_BY * steps[len(steps) // 2] if steps else 0.0
    groups: list[list[tuple[float, Value]]] = []
    for point in points:
        if groups and point[0] - groups[-1][-1][0] <= longest:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _hovers(lines: Sequence[Curve], axes: Axes, *, show: Show, show_across: Show) -> Iterator[Mark]:
    """Yield columns without a colour that say what stands above them."""
    xs = [x for x, _ in lines[0].points]
    size = math.ceil(len(xs) / MOST_TITLES)
    for number in range(0, len(xs), size):
        left, right = (axes.across.share(xs[min(place, len(xs) - 1)]) for place in (number, number + size))
        said = [
            f"{line.name} {show(value)}"
            for line in lines
            if number < len(line.points) and (value := line.points[number][1]) is not None
        ]
        if said:
            words = f"{show_across(xs[number])}  {', '.join(said)}"
            at = ((left, 0.0), (max(right, left + 0.002), axes.height + 2 * PAD))
            yield Mark(shape="hover", at=at, title=words)


def _describe_line(line: Curve, show: Show) -> str:
    values = [value for _, value in line.known]
    first, last, low, high = map(show, (values[0], values[-1], min(values), max(values)))
    return f"{line.name} from {first} to {last}, between {low} and {high}"
