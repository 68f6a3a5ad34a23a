"""The charts of every page and every figure file, laid out once.

A chart is a `Drawing`: a list of marks with the words around them.  Marks are placed in shares of the width
across and in pixels down, so one drawing fills a phone, a sheet of paper and a figure file while its text and
its dots keep their size.  `inline` turns drawings into HTML, `figures` into PNG and SVG files.  Colours are
names of tokens.css.

    curves     lines over steps or over time, with a limit
    stack      areas one upon the other
    columns    bars beside each other, each split into parts
    scatter    dots in two dimensions
    Rows       bars, dots and intervals along one common axis, a row each
    Matrix     cells that are coloured by their value
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from flatout.page.scales import Scale, Show, show_value

Value = TypeVar("Value")
Point = tuple[float, float]
Shape = Literal["line", "area", "rect", "dot", "text", "hover"]

HEIGHT = 130.0  # pixels of a drawing, without its pads
PAD = 8.0  # above and below, so that a line at the edge keeps its thickness
MOST_POINTS = 400  # of one line; more cannot be seen and make a page heavy
MOST_TITLES = 75
SEPARATED_BY = 3.0  # usual distances between points; further apart is a gap


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One shape with its corners (a rect has two), each a share of the width across and pixels down."""

    shape: Shape
    at: tuple[Point, ...]
    colour: str = "ink"  # of tokens.css, or #rrggbb
    title: str = ""  # what a pointer is told
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
class Line:
    """One line: its name, colour and points (across, up); None is a value nobody knows."""

    name: str
    colour: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False

    @property
    def known(self) -> list[Point]:
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]


# Lines and areas


def curves(
    lines: Sequence[Line],
    *,
    across: Scale,
    up: Scale,
    show: Show = show_value,
    show_across: Show | None = None,
    limit: tuple[str, float] | None = None,
    has_gaps: bool = False,
    shows_last: bool = False,
    height: float = HEIGHT,
) -> Drawing | None:
    """Lines over common axes; None where no line has a value.

    A `limit` beyond the axis is named and not drawn.  With `has_gaps`, an unknown value or a long silence
    interrupts a line; without, the line goes on to the next value.  With `show_across`, columns say what
    stands above them.
    """
    known = [line for line in lines if line.known]
    if not known:
        return None
    marks, levels = grid(up, height)
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
        drawn = up.low <= limit[1] <= up.high
        keys.append(
            Key(name=f"{limit[0]} {show(limit[1])}", colour="accent", kind="dashes" if drawn else "none")
        )
        if drawn:
            marks.append(level_mark(limit[1], up, height, colour="accent"))
    for line in known:
        runs = _runs(line.points) if has_gaps else [line.known]
        size = math.ceil(sum(map(len, runs)) / MOST_POINTS)
        for run in runs:
            corners = [(across.share(x), _down(up.share(y), height)) for x, y in thinned(run, size=size)]
            marks.append(_line_mark(corners, line))
    if show_across is not None:
        marks += _hovers(known, across=across, show=show, show_across=show_across, height=height)
    return Drawing(
        label="; ".join(_spoken(line, show) for line in known),
        height=height + 2 * PAD,
        marks=tuple(marks),
        levels=levels,
        foot=foot_of(across),
        legend=tuple(keys) if len(keys) > 1 or shows_last else (),
    )


def thinned(points: Sequence[Point], *, size: int) -> list[Point]:
    """The mean of each `size` neighbours, at the last of them."""
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(y / len(group) for _, y in group)) for group in groups]


def stack(
    layers: Sequence[Line],
    *,
    across: Scale,
    up: Scale,
    label: str,
    is_stair: bool = False,
    height: float = HEIGHT,
) -> Drawing:
    """Areas one upon the other, over points they share; a silence is a gap.

    The edge of a stair stays where it is until the next point.
    """
    xs = [x for x, _ in layers[0].points] if layers else []
    rows = list(
        zip(xs, zip(*([y or 0.0 for _, y in layer.points] for layer in layers), strict=True), strict=True)
    )
    grid_marks, levels = grid(up, height)
    marks: list[Mark] = []
    for run in [rows] if is_stair else _together(rows):
        places = [across.share(x) for x, _ in run]
        if len(run) == 1:  # a point alone is a column, or it would not be seen
            run, places = run * 2, [places[0] - 0.0015, places[0] + 0.0015]
        base = [0.0] * len(run)
        for number, layer in enumerate(layers):
            over = [low + values[number] for low, (_, values) in zip(base, run, strict=True)]
            if over != base:
                edges = [
                    [(x, _down(up.share(y), height)) for x, y in zip(places, side, strict=True)]
                    for side in (over, base)
                ]
                top, bottom = map(_stair, edges) if is_stair else edges
                marks.append(Mark(shape="area", at=(*top, *reversed(bottom)), colour=layer.colour))
            base = over
    keys = [Key(name=layer.name, colour=layer.colour) for layer in layers if any(y for _, y in layer.points)]
    return Drawing(
        label=label,
        height=height + 2 * PAD,
        marks=(*grid_marks, *marks),
        levels=levels,
        foot=foot_of(across),
        legend=tuple(keys),
    )


def _stair(edge: list[Point]) -> list[Point]:
    return [
        edge[0],
        *(corner for (_, y), right in itertools.pairwise(edge) for corner in ((right[0], y), right)),
    ]


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
    *,
    across: Scale,
    up: Scale,
    label: str,
    legend: Sequence[Key] = (),
    height: float = HEIGHT,
) -> Drawing:
    """Bars beside each other; one that is higher than the axis is cut off, and marked."""
    marks, levels = grid(up, height)
    for bar in bars:
        left, right = across.share(bar.left), across.share(bar.right)
        opacity, base = 0.4 if bar.is_pale else 1.0, 0.0
        for colour, value in bar.parts:
            bottom, top = _down(up.share(base), height), _down(up.share(base + value), height)
            base += value
            if bottom > top:
                at = ((left, top), (right, bottom))
                marks.append(Mark(shape="rect", at=at, colour=colour, title=bar.title, opacity=opacity))
        if base > up.high:
            marks.append(Mark(shape="rect", at=((left, PAD + 8), (right, PAD + 12)), colour="paper"))
    return Drawing(
        label=label,
        height=height + 2 * PAD,
        marks=tuple(marks),
        levels=levels,
        foot=foot_of(across),
        legend=tuple(legend),
    )


def scatter(
    dots: Sequence[Mark],
    *,
    across: Scale,
    up: Scale,
    label: str,
    rules: Sequence[Mark] = (),
    height: float = HEIGHT,
) -> Drawing:
    """Dots, and behind them lines, whose corners are values of both axes."""
    marks, levels = grid(up, height)
    marks += [
        replace(mark, at=tuple((across.share(x), _down(up.share(y), height)) for x, y in mark.at))
        for mark in (*rules, *dots)
    ]
    return Drawing(
        label=label, height=height + 2 * PAD, marks=tuple(marks), levels=levels, foot=foot_of(across)
    )


# Rows along one axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row: its name, the figure at its end, what is drawn in it, and that in words."""

    name: str
    marks: tuple[Mark, ...]
    label: str
    figure: str = ""
    note: str = ""  # a sentence below the name


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows over one axis; marks of a row are placed by `bar`, `dot`, `interval` and `rule`."""

    rows: tuple[Row, ...]
    across: Scale = field(default_factory=lambda: Scale(low=0.0, high=1.0))
    height: float = 28.0  # of one row
    legend: tuple[Key, ...] = ()
    kind: str = "rows"  # class of the whole: how the style sheet places names beside drawings

    def bar(
        self, low: float, high: float, colour: str, *, title: str = "", lane: tuple[float, float] = (0, 1)
    ) -> Mark:
        """A bar between two values, in a lane of the row's height."""
        at = (
            (self.across.share(low), lane[0] * self.height),
            (self.across.share(high), lane[1] * self.height),
        )
        return Mark(shape="rect", at=at, colour=colour, title=title)

    def dot(
        self, value: float, colour: str, *, size: float = 5.0, title: str = "", hollow: bool = False
    ) -> Mark:
        at = ((self.across.share(value), self.height / 2),)
        return Mark(shape="dot", at=at, colour=colour, size=size, title=title, hollow=hollow)

    def interval(self, low: float, high: float, colour: str) -> list[Mark]:
        """A line between two values, with a stop at each end."""
        left, right, middle = self.across.share(low), self.across.share(high), self.height / 2
        lines = [((left, middle), (right, middle))]
        lines += [((x, middle - 6), (x, middle + 6)) for x in (left, right)]
        return [Mark(shape="line", at=at, colour=colour, size=1.5) for at in lines]

    def rule(self, value: float, colour: str = "soft", *, dashed: bool = False) -> Mark:
        """A line across the row at a value."""
        x = self.across.share(value)
        return Mark(shape="line", at=((x, 0.0), (x, self.height)), colour=colour, dashed=dashed)

    def track(self) -> Mark:
        """The axis itself, behind everything else."""
        return Mark(shape="line", at=((0.0, self.height / 2), (1.0, self.height / 2)), colour="line")


# Cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell: what it says, what a pointer is told, its colour, and how much of it, 0 to 1."""

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


Chart = Drawing | Rows | Matrix


# Parts


def grid(up: Scale, height: float = HEIGHT) -> tuple[list[Mark], tuple[tuple[str, float], ...]]:
    """A line per tick of the axis upwards, and the words beside them."""
    marks = [level_mark(value, up, height, colour="line", dashed=False) for value, _ in up.ticks]
    return marks, tuple((text, _down(up.share(value), height)) for value, text in up.ticks)


def level_mark(value: float, up: Scale, height: float = HEIGHT, *, colour: str, dashed: bool = True) -> Mark:
    """A line over the whole width at one value."""
    y = _down(up.share(value), height)
    return Mark(shape="line", at=((0.0, y), (1.0, y)), colour=colour, dashed=dashed)


def foot_of(across: Scale) -> tuple[tuple[str, float], ...]:
    """The ticks of the axis across: text and place."""
    return tuple((text, across.share(value)) for value, text in across.ticks)


def _down(share: float, height: float) -> float:
    return round(PAD + height * (1 - share), 2)


def _line_mark(corners: list[Point], line: Line) -> Mark:
    if len(corners) == 1:  # a point alone is a short dash, or it would not be seen
        ((x, y),) = corners
        corners = [(max(x - 0.005, 0.0), y), (min(x + 0.005, 1.0), y)]
    return Mark(shape="line", at=tuple(corners), colour=line.colour, size=1.6, dashed=line.dashed)


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[Point]]:
    """Points that belong together: neither an unknown value nor a long silence lies between them."""
    runs: list[list[Point]] = []
    for group in _together(points):
        run: list[Point] = []
        for x, value in group:
            if value is not None and math.isfinite(value):
                run.append((x, value))
            elif run:
                runs.append(run)
                run = []
        runs.append(run)
    return [run for run in runs if run]


def _together(points: Sequence[tuple[float, Value]]) -> list[list[tuple[float, Value]]]:
    """Points without a silence between them."""
    steps = sorted(later[0] - earlier[0] for earlier, later in itertools.pairwise(points))
    longest = SEPARATED_BY * steps[len(steps) // 2] if steps else 0.0
    groups: list[list[tuple[float, Value]]] = []
    for point in points:
        if groups and point[0] - groups[-1][-1][0] <= longest:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _hovers(
    lines: Sequence[Line], *, across: Scale, show: Show, show_across: Show, height: float
) -> Iterable[Mark]:
    """Columns without a colour that say what stands above them."""
    xs = [x for x, _ in lines[0].points]
    size = math.ceil(len(xs) / MOST_TITLES)
    for number in range(0, len(xs), size):
        left, right = (across.share(xs[min(place, len(xs) - 1)]) for place in (number, number + size))
        said = [
            f"{line.name} {show(value)}"
            for line in lines
            if number < len(line.points) and (value := line.points[number][1]) is not None
        ]
        if said:
            words = f"{show_across(xs[number])}  {', '.join(said)}"
            at = ((left, 0.0), (max(right, left + 0.002), height + 2 * PAD))
            yield Mark(shape="hover", at=at, title=words)


def _spoken(line: Line, show: Callable[[float], str]) -> str:
    values = [value for _, value in line.known]
    first, last, low, high = map(show, (values[0], values[-1], min(values), max(values)))
    return f"{line.name} from {first} to {last}, between {low} and {high}"
