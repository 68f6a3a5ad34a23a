"""Curves over the steps of a run, as inline SVG.

Shapes are drawn in a box of 1000 units that is stretched to the page's width, with strokes that keep their
thickness; text stands in drawings of its own, which are not stretched.  A report without a value leaves no
point, and the line goes on to the next: evaluations are rarer than steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.engines.adapters.training.log import StepRecord
from flatout.page.markup import Html, tag

WIDTH, HEIGHT, PAD = 1000.0, 96.0, 6.0
MOST_POINTS = 400  # of one line; more cannot be seen and make the page heavy

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line: its name, the class that colours it, and its points as (step, value)."""

    name: str
    colour: str
    points: Points


def loss_line(records: Sequence[StepRecord], key: str, *, name: str, colour: str = "first") -> Line:
    """A loss by its name in the log."""
    found = [(record.step, record.losses.get(key)) for record in records]
    return Line(name=name, colour=colour, points=_known(found))


def validation_line(
    records: Sequence[StepRecord], task: str, key: str, *, name: str, colour: str = "second"
) -> Line:
    """A score, or the loss, of a task on rows held out."""
    found = [(record.step, record.validation.get(task, {}).get(key)) for record in records]
    return Line(name=name, colour=colour, points=_known(found))


def routing_line(records: Sequence[StepRecord], key: str, *, name: str, colour: str = "second") -> Line:
    """A figure of the router."""
    found = [(record.step, record.routing.get(key)) for record in records]
    return Line(name=name, colour=colour, points=_known(found))


def _known(found: Sequence[tuple[int, float | None]]) -> Points:
    return tuple((step, value) for step, value in found if value is not None and math.isfinite(value))


def thinned(points: Points, *, most: int = MOST_POINTS) -> Points:
    """At most `most` points: the mean of each group of neighbours, at its last step."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return tuple((group[-1][0], sum(value for _, value in group) / len(group)) for group in groups)


def curve(lines: Sequence[Line], *, from_zero: bool = False) -> Html | None:
    """Lines over a common axis of steps; None where no line has a point."""
    known = [line for line in lines if line.points]
    if not known:
        return None
    steps = [step for line in known for step, _ in line.points]
    values = [value for line in known for _, value in line.points]
    first, last = min(0, *steps), max(*steps, 1)
    low, high = (min(0.0, *values) if from_zero else min(values)), max(values)
    if high - low <= 1e-9 * max(1.0, abs(high)):
        around = max(0.5, 0.1 * abs(high))
        low, high = low - around, high + around

    def place(step: int, value: float) -> str:
        x = WIDTH * (step - first) / (last - first)
        return f"{x:.1f},{PAD + HEIGHT * (1 - (value - low) / (high - low)):.1f}"

    levels = (low, (low + high) / 2, high)
    height = HEIGHT + 2 * PAD
    drawn = [
        tag("line", x1=0, x2=WIDTH, y1=y, y2=y, class_="grid")
        for y in (PAD + HEIGHT * (1 - share) for share in (0.0, 0.5, 1.0))
    ]
    for line in known:
        corners = [place(step, value) for step, value in thinned(line.points)]
        if len(corners) == 1:  # a point alone is a short dash, or it would not be seen
            x, y = corners[0].split(",")
            corners = [f"{max(float(x) - 6, 0):.1f},{y}", f"{min(float(x) + 6, WIDTH):.1f},{y}"]
        drawn.append(tag("polyline", points=" ".join(corners), class_=line.colour))
    axis = [
        tag(
            "text",
            _show_level(level, high - low),
            x=46,
            y=round(PAD + HEIGHT * (1 - share) + 4, 1),
            text_anchor="end",
        )
        for level, share in zip(levels, (0.0, 0.5, 1.0), strict=True)
    ]
    ends = [
        tag("text", f"{first:,}", x="0%", y=12, text_anchor="start"),
        tag("text", f"{last:,} steps", x="100%", y=12, text_anchor="end"),
    ]
    picture = tag(
        "svg",
        *drawn,
        width="100%",
        height=height,
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        preserveAspectRatio="none",
        role="img",
        aria_label="; ".join(_spoken(line) for line in known),
    )
    names = [tag("li", tag("i", class_=line.colour), f"{line.name} ", _last(line)) for line in known]
    return tag(
        "figure",
        tag("ul", *names, class_="legend"),
        tag(
            "div",
            tag("svg", *axis, class_="axis", width=50, height=height, aria_hidden="true"),
            picture,
            tag("span"),
            tag("svg", *ends, class_="axis", width="100%", height=16, aria_hidden="true"),
            class_="curve",
        ),
    )


def show_value(value: float) -> str:
    size = abs(value)
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}" if size >= 1e-3 or size < 1e-12 else f"{value:.0e}"


def _show_level(level: float, span: float) -> str:
    """With as many digits as tell the levels of an axis apart."""
    if abs(level) < 1e-12:
        return "0"
    if abs(level) + span < 1e-3 or abs(level) >= 1e5:
        return f"{level:.1e}"
    return f"{level:.{min(max(1 - math.floor(math.log10(span)), 0), 5)}f}"


def _last(line: Line) -> Html:
    return tag("b", show_value(line.points[-1][1]))


def _spoken(line: Line) -> str:
    values = [value for _, value in line.points]
    return (
        f"{line.name} from {show_value(values[0])} to {show_value(values[-1])}, "
        f"between {show_value(min(values))} and {show_value(max(values))}"
    )
