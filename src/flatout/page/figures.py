"""Charts as one PNG or SVG file, for a paper, a ticket or a chat.

The panels' drawings are placed on one canvas of pixels.  SVG is that list of marks written down, in literal
colours that every viewer knows; PNG is the same list drawn by matplotlib (extra `plots`).
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from flatout.ground.atomic_files import write_whole
from flatout.ground.errors import BadInput, import_extra
from flatout.ground.units import UNKNOWN
from flatout.page.charts import Chart, Drawing, Key, Mark, Matrix, foot_of
from flatout.page.inline import DARKEST, PALEST, anchor_at, svg_mark
from flatout.page.markup import tag
from flatout.page.printable import printable, shorten

WIDTH = 1100.0
MARGIN, GAP = 18.0, 30.0  # around the canvas, between panels
GUTTER, LINE, ROW = 64.0, 17.0, 26.0  # left of a drawing, a line of words, a row of a matrix
LETTER = 6.2  # pixels of a letter, about
LONGEST_TITLE, LONGEST_NAME = 120, 26
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"


LIGHT: dict[str, str] = dict(  # the colours of tokens.css by name, as they are on white paper
    re.findall(
        r"--([\w-]+): light-dark\((#\w+), #\w+\)",
        resources.files("flatout.page").joinpath("tokens.css").read_text(encoding="utf-8"),
    )
)


def write_figure(path: Path, panels: Mapping[str, Chart | None], *, title: str, num_columns: int = 2) -> Path:
    """Draw charts under their titles into a file, PNG or SVG by the suffix of `path`.

    A chart that is None shows as n/a.
    """
    kind = path.suffix.lower()
    if kind not in (".png", ".svg"):
        raise BadInput(f"{path} is neither a .png nor a .svg file", hint="give one of these endings")
    marks, height = _canvas(panels, title=title, num_columns=num_columns)
    write_whole(path, _svg(marks, height) if kind == ".svg" else _png(marks, height))
    return path


# Placing


def _canvas(panels: Mapping[str, Chart | None], *, title: str, num_columns: int) -> tuple[list[Mark], float]:
    marks = [_text(shorten(printable(title), LONGEST_TITLE), MARGIN, MARGIN + 10, size=14.0, colour="ink")]
    width = (WIDTH - 2 * MARGIN - GAP * (num_columns - 1)) / num_columns
    y, deepest = MARGIN + 34, 0.0
    for place, (name, chart) in enumerate(panels.items()):
        column = place % num_columns
        if place and column == 0:
            y, deepest = y + deepest + GAP, 0.0
        x = MARGIN + column * (width + GAP)
        marks.append(_text(name, x, y, size=12.0, colour="ink"))
        placed, height = _place(chart, x, y + 10, width)
        marks += placed
        deepest = max(deepest, height)
    return marks, y + deepest + GAP


def _place(chart: Chart | None, x: float, y: float, width: float) -> tuple[list[Mark], float]:
    """Return the marks of a chart in pixels, and the height it takes."""
    if chart is None:
        return [_text(UNKNOWN, x + width / 2, y + 40, anchor="middle")], 80.0
    if isinstance(chart, Matrix):
        return _place_matrix(chart, x, y, width)
    marks, below = _place_legend(chart.legend, x, y, width)
    if isinstance(chart, Drawing):
        left, right, rows = GUTTER, 0.0, [(chart.marks, chart.height)]
        marks += [
            _text(text, x + GUTTER - 6, below + level + 4, anchor="end") for text, level in chart.levels
        ]
        foot, name, is_inside = chart.foot, chart.name_across, True
    else:
        left, right = (_gutter([row.name for row in chart.rows]), _gutter([row.figure for row in chart.rows]))
        rows, foot, name = [(row.marks, chart.height + 4) for row in chart.rows], foot_of(chart.across), ""
        is_inside = chart.kind != "rows"
        for number, row in enumerate(chart.rows):
            middle = below + number * (chart.height + 4) + chart.height / 2 + 4
            marks.append(_text(_short(row.name), x, middle, colour="ink"))
            marks.append(_text(row.figure, x + width, middle, anchor="end"))
    inside = width - left - right
    for drawn, height in rows:
        marks += [
            replace(mark, at=tuple((x + left + inside * across, below + down) for across, down in mark.at))
            for mark in drawn
            if mark.shape != "hover"
        ]
        below += height
    for text, place in foot:
        marks.append(
            _text(text, x + left + inside * place, below + 12, anchor=anchor_at(place, is_inside=is_inside))
        )
    if name:
        marks.append(_text(name, x + left + inside / 2, below + 12 + LINE, anchor="middle"))
    return marks, below - y + LINE * (1 + bool(name))


def _place_legend(keys: Sequence[Key], x: float, y: float, width: float) -> tuple[list[Mark], float]:
    """Place the legend in as many lines as it needs; return where it ends."""
    marks: list[Mark] = []
    left, y = x, y + (LINE if keys else 0)
    for key in keys:
        words = f"{_short(key.name)} {key.value}".strip()
        needed = LETTER * len(words) + 28
        if left > x and left + needed > x + width:
            left, y = x, y + LINE
        box = ((left, y - 9), (left + 9, y))
        match key.kind:
            case "box":
                marks.append(Mark(shape="rect", at=box, colour=key.colour))
            case "dashes":
                ends = ((left - 2, y - 4), (left + 11, y - 4))
                marks.append(Mark(shape="line", at=ends, colour=key.colour, dashed=True, size=1.6))
            case "dot" | "ring":
                middle = ((left + 4.5, y - 4.5),)
                marks.append(
                    Mark(shape="dot", at=middle, colour=key.colour, size=4.5, hollow=key.kind == "ring")
                )
        marks.append(_text(words, left + 15, y))
        left += needed
    return marks, y + (6 if keys else 0)


def _place_matrix(chart: Matrix, x: float, y: float, width: float) -> tuple[list[Mark], float]:
    names = [_short(name) for name in chart.rows]
    left = LETTER * max([*map(len, names), 4]) + 10
    num = len(chart.columns) or len(chart.edges) - 1
    size = (width - left) / num
    top = y + LINE + 4
    marks = [_text(_short(chart.corner), x, y + LINE - 3, size=9.0)]
    for number, text in enumerate(chart.columns or chart.edges):
        # Names stand above their column, numbers on the borders between columns.
        place = x + left + (number + 0.5 * bool(chart.columns)) * size
        words = text if chart.edges else shorten(text, max(3, int(size / LETTER) - 1))
        marks.append(_text(words, place, y + LINE - 3, anchor="middle"))
    for number, (name, line) in enumerate(zip(names, chart.cells, strict=True)):
        upper, lower = top + number * ROW, top + (number + 1) * ROW
        marks.append(_text(name, x + left - 8, lower - 9, anchor="end"))
        for column, cell in enumerate(line):
            if cell is None:
                continue
            at = ((x + left + column * size + 1, upper + 1), (x + left + (column + 1) * size - 1, lower - 1))
            amount = PALEST + (DARKEST - PALEST) * min(max(cell.strength, 0.0), 1.0)
            if cell.strength > 0:
                marks.append(Mark(shape="rect", at=at, colour=cell.colour, opacity=amount))
            if cell.is_outlined:
                marks.append(Mark(shape="rect", at=at, hollow=True, size=2.0))
            middle = (at[0][0] + at[1][0]) / 2
            marks.append(_text(cell.text, middle, lower - 9, anchor="middle", colour="ink"))
    bottom = top + len(names) * ROW
    if chart.name_across:
        marks.append(_text(chart.name_across, x + left + (width - left) / 2, bottom + 14, anchor="middle"))
    return marks, bottom - y + LINE


def _text(
    text: str, x: float, y: float, *, anchor: Any = "start", size: float = 11.0, colour: str = "soft"
) -> Mark:
    return Mark(shape="text", at=((x, y),), text=printable(text), anchor=anchor, size=size, colour=colour)


def _gutter(words: Sequence[str]) -> float:
    """Return the width of a column that holds words."""
    longest = min(max(map(len, words), default=0), LONGEST_NAME)
    return LETTER * longest + 12 if longest else 0.0


def _short(name: str) -> str:
    return shorten(printable(name), LONGEST_NAME)


# Writing


def _svg(marks: Iterable[Mark], height: float) -> bytes:
    shapes = [svg_mark(mark, across=lambda x: round(x, 2), paint=_hex) for mark in marks]
    whole = tag(
        "svg",
        tag("rect", width=WIDTH, height=height, fill=LIGHT["paper"]),
        *shapes,
        xmlns="http://www.w3.org/2000/svg",
        width=WIDTH,
        height=height,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        font_family=FONT,
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{whole}\n'.encode()


def _hex(colour: str) -> str:
    return LIGHT.get(colour, colour)


def _png(marks: Iterable[Mark], height: float) -> bytes:
    figures = import_extra("matplotlib.figure", extra="plots")
    canvas = import_extra("matplotlib.backends.backend_agg", extra="plots")
    figure = figures.Figure(figsize=(WIDTH / 100, height / 100), dpi=100, facecolor=LIGHT["paper"])
    canvas.FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    for order, mark in enumerate(marks):
        artist = _artist(mark)
        artist.set(zorder=order, clip_on=False)
        axes.add_artist(artist)
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # drawn as a box
        figure.savefig(content, dpi=150, format="png")
    return content.getvalue()


def _artist(mark: Mark) -> Any:
    """Make a mark for matplotlib, which measures lines and letters in points: 1 pixel is 0.72 points."""
    lines, patches, texts = (
        import_extra(f"matplotlib.{name}", extra="plots") for name in ("lines", "patches", "text")
    )
    colour, (x, y), (right, bottom) = _hex(mark.colour), mark.at[0], mark.at[-1]
    look: dict[str, Any] = {"alpha": mark.opacity, "facecolor": colour, "linewidth": 0}
    if mark.hollow:
        thickness = 1.6 if mark.shape == "dot" else mark.size
        look = {"fill": False, "edgecolor": colour, "linewidth": 0.72 * thickness}
    match mark.shape:
        case "line":
            xs, ys = zip(*mark.at, strict=True)
            dashes = (4, 3) if mark.dashed else (None, None)
            look = {"color": colour, "linewidth": 0.72 * mark.size, "alpha": mark.opacity, "dashes": dashes}
            return lines.Line2D(xs, ys, **look)
        case "area":
            return patches.Polygon(mark.at, closed=True, **look)
        case "dot":
            return patches.Circle((x, y), mark.size, **look)
        case "text":
            side = {"start": "left", "middle": "center", "end": "right"}[mark.anchor]
            look = {"color": colour, "fontsize": 0.72 * mark.size, "parse_math": False}
            return texts.Text(x, y, mark.text, horizontalalignment=side, **look)
        case _:
            return patches.Rectangle((x, y), right - x, bottom - y, **look)
