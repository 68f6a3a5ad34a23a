"""Charts inside an HTML page: SVG that takes the page's width and colours, with words beside it.

Lines and areas are drawn in a box of 1000 units that is stretched to the width, with strokes that keep their
thickness; everything else is placed by percentages.  Words stand in elements of their own, which are not
stretched.  A pointer that rests on a mark is told its title: that needs no script.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from flatout.page.charts import Cell, Chart, ChartRow, Drawing, Key, Mark, Matrix, RowChart, foot_of
from flatout.page.markup import Html, join, tag

WIDTH = 1000.0
PALEST, DARKEST = 0.04, 0.72  # how much colour the smallest and the largest value of a matrix get


def inline(chart: Chart) -> Html:
    """Turn any chart into an element of a page."""
    if isinstance(chart, Matrix):
        return _table(chart)
    if isinstance(chart, RowChart):
        return _rows(chart)
    return tag("figure", legend(chart.legend), _frame(chart))


def legend(keys: Sequence[Key]) -> Html:
    """List the names of the colours; nothing if there are none."""
    items = [
        tag("li", tag("i", class_=key.kind, style=f"--c: {paint(key.colour)}"), key.name, _last(key))
        for key in keys
    ]
    return tag("ul", *items, class_="legend") if items else Html()


def _last(key: Key) -> Html:
    return join((" ", tag("b", key.value))) if key.value else Html()


def paint(colour: str) -> str:
    """Return a colour for the style sheet: a token follows the reader's theme."""
    return colour if colour.startswith("#") else f"var(--{colour})"


def _frame(drawing: Drawing) -> Html:
    levels = [tag("text", text, x="100%", y=round(y + 4, 1), text_anchor="end") for text, y in drawing.levels]
    side = tag("svg", *levels, width="100%", height=drawing.height, aria_hidden="true")
    return tag(
        "div",
        side,
        _svg(drawing),
        tag("span"),
        _foot(drawing.foot, name=drawing.name_across),
        class_="framed",
    )


def _svg(drawing: Drawing | ChartRow, *, height: float | None = None) -> Html:
    size = drawing.height if isinstance(drawing, Drawing) else height
    marks = _marks(drawing.marks, size or 0.0)
    return tag("svg", *marks, width="100%", height=size, role="img", aria_label=drawing.label)


def _foot(foot: Sequence[tuple[str, float]], *, name: str = "", is_inside: bool = True) -> Html:
    words = [
        tag("text", text, x=f"{100 * x:.3f}%", y=12, text_anchor=anchor_at(x, is_inside=is_inside))
        for text, x in foot
    ]
    words += [tag("text", name, x="50%", y=28, text_anchor="middle")] if name else []
    return (
        tag("svg", *words, width="100%", height=32 if name else 16, aria_hidden="true") if words else Html()
    )


def anchor_at(place: float, *, is_inside: bool = True) -> Literal["start", "middle", "end"]:
    """Return where a word is anchored: those at the ends of a drawing stay inside it."""
    return "start" if is_inside and place <= 0.01 else "end" if is_inside and place >= 0.99 else "middle"


# Marks


def _marks(marks: Iterable[Mark], height: float) -> Iterable[Html]:
    def is_stretched(mark: Mark) -> bool:
        return mark.shape == "area" or (mark.shape == "line" and len(mark.at) > 2)

    for stretched, group in itertools.groupby(marks, key=is_stretched):
        if stretched:
            yield tag(
                "svg",
                *(svg_mark(mark, across=lambda x: round(WIDTH * x, 1), paint=paint) for mark in group),
                width="100%",
                height=height,
                viewBox=f"0 0 {WIDTH:.0f} {height:g}",
                preserveAspectRatio="none",
            )
        else:
            yield from (svg_mark(mark, across=lambda x: f"{100 * x:.3f}%", paint=paint) for mark in group)


def svg_mark(mark: Mark, *, across: Callable[[float], str | float], paint: Callable[[str], str]) -> Html:
    """Turn one mark into an element of SVG; `across` places it, `paint` colours it."""
    title = [tag("title", mark.title)] if mark.title else []
    colour = paint(mark.colour)
    outline: dict[str, str | float | None] = {
        "stroke": colour,
        "stroke_width": mark.size,
        "stroke_dasharray": "4 3" if mark.dashed else None,
        "opacity": None if mark.opacity == 1 else round(mark.opacity, 3),
    }
    filled: dict[str, str | float | None] = {"fill": colour, "opacity": outline["opacity"]}
    (x, y), (right, bottom) = mark.at[0], mark.at[-1]
    match mark.shape:
        case "line" if len(mark.at) == 2:
            return tag("line", *title, x1=across(x), y1=y, x2=across(right), y2=bottom, **outline)
        case "line" | "area":
            corners = " ".join(f"{across(left)},{round(top, 1):g}" for left, top in mark.at)
            if mark.shape == "area":
                return tag("polygon", *title, points=corners, **filled)
            return tag("polyline", *title, points=corners, fill="none", **outline)
        case "dot":
            look = {**outline, "stroke_width": 1.6, "fill": "none"} if mark.hollow else filled
            return tag("circle", *title, cx=across(x), cy=y, r=mark.size, **look)
        case "text":
            return tag(
                "text", mark.text, x=across(x), y=y, text_anchor=mark.anchor, font_size=mark.size, **filled
            )
        case _:
            width = across(right - x)
            look = {**outline, "fill": "none"} if mark.hollow else filled
            if mark.shape == "hover":
                look = {"class_": "hover"}
            return tag("rect", *title, x=across(x), y=y, width=width, height=round(bottom - y, 2), **look)


# Rows and cells


def _rows(chart: RowChart) -> Html:
    parts = []
    for row in chart.rows:
        drawn = _svg(row, height=chart.height)
        if row.note:
            said = tag("div", tag("b", row.name), tag("span", row.figure), tag("p", row.note))
            parts.append(tag("div", said, drawn, tag("span"), class_="row"))
        else:
            parts.append(tag("div", tag("b", row.name), drawn, tag("span", row.figure), class_="row"))
    foot = _foot(foot_of(chart.across), is_inside=chart.kind != "rows")
    if foot:
        parts.append(tag("div", tag("b"), foot, tag("span"), class_="row"))
    return tag("div", legend(chart.legend), *parts, class_=chart.kind)


def _table(chart: Matrix) -> Html:
    """Make a table of coloured cells, which scrolls inside itself if it is too wide."""
    heads = [tag("th", name, scope="col") for name in chart.columns]
    if chart.edges:  # each number stands on a border, the last one at the end of its column
        heads = [tag("th", tag("span", name), scope="col") for name in chart.edges[:-1]]
        heads[-1] = tag("th", tag("span", chart.edges[-2]), tag("em", chart.edges[-1]), scope="col")
    body = [
        tag("tr", tag("th", name, scope="row"), *(_cell(cell) for cell in line))
        for name, line in zip(chart.rows, chart.cells, strict=True)
    ]
    head = tag("thead", tag("tr", tag("th", chart.corner), *heads))
    kind = "matrix edged" if chart.edges else "matrix"
    whole = tag("table", head, tag("tbody", *body), class_=kind, aria_label=chart.label)
    name = tag("p", chart.name_across, class_="note across") if chart.name_across else Html()
    return tag("div", whole, name, class_="scroll")


def _cell(cell: Cell | None) -> Html:
    if cell is None:
        return tag("td")
    amount = PALEST + (DARKEST - PALEST) * min(max(cell.strength, 0.0), 1.0)
    return tag(
        "td",
        cell.text,
        title=cell.title or None,
        class_="outlined" if cell.is_outlined else None,
        style=f"--c: {paint(cell.colour)}; --amount: {100 * amount:.0f}%" if cell.strength > 0 else None,
    )
