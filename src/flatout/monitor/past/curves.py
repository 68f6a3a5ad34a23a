"""Curves over the time of a run as inline SVG: lines, stacked phases, and the strip of verdicts.

Shapes are drawn in a box of 1000 units that is stretched to the page's width, with strokes that keep their
thickness; text stands in drawings of its own, which are not stretched.  A value nobody knows is a gap in
its line.  Hovering a column says its time and its values: titles do that without a script.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flatout.doctor.timeline import round_ticks
from flatout.measure import PHASES
from flatout.monitor.past.recorded import Stretch
from flatout.page.markup import Html, tag
from flatout.units import show_share

Value = TypeVar("Value")
WIDTH, HEIGHT = 1000.0, 130.0
PAD = 8.0  # above and below, so that a line at the edge keeps its thickness
MOST_TITLES = 75
NUM_TIMES = 5
SEPARATED_BY = 3.0  # usual distances between points; further apart is a gap


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line: its name, the class that colours it, and its points as (seconds of the run, value)."""

    name: str
    colour: str
    points: Sequence[tuple[float, float | None]]

    @property
    def is_known(self) -> bool:
        return any(value is not None and math.isfinite(value) for _, value in self.points)


def chart(
    series: Sequence[Series],
    *,
    span_s: float,
    show: Callable[[float], str],
    top: float | None = None,
    from_zero: bool = True,
    limit: tuple[str, float] | None = None,
    binary: bool = False,
) -> Html:
    """Lines over a common axis; `limit` is a level that is drawn where it is not far above all.

    The axis of `binary` values is marked at round numbers of KiB, MiB or GiB.
    """
    known = [each for each in series if each.is_known]
    values = [v for each in known for _, v in each.points if v is not None and math.isfinite(v)]
    low = 0.0 if from_zero else min(values)
    high = top or max(values)
    if limit is not None and limit[1] <= 1.6 * high:
        high = max(high, limit[1])
    scale = 1024.0 ** math.floor(math.log(max(high, 1.0), 1024)) if binary else 1.0
    if high <= low:
        low, high = (low - abs(low) * 0.1 - 1e-9, low + abs(low) * 0.1 + 1e-9) if low else (0.0, 1.0)
    ticks = _ticks(low, high, scale)

    def down(value: float) -> float:
        return PAD + HEIGHT * (1 - (value - low) / (high - low))

    drawn = [tag("line", x1=0, x2=WIDTH, y1=down(tick), y2=down(tick), class_="grid") for tick in ticks]
    if limit is not None and low <= limit[1] <= high:
        drawn.append(tag("line", x1=0, x2=WIDTH, y1=down(limit[1]), y2=down(limit[1]), class_="limit"))
    for each in known:
        drawn += [tag("polyline", points=_path(run, span_s, down), class_=each.colour) for run in _runs(each)]
    drawn += _titles(known, span_s, show)
    names = [(each.name, each.colour) for each in known]
    if limit is not None:
        names.append((f"{limit[0]} {show(limit[1])}", "limit" if limit[1] <= high else "beyond"))
    return tag(
        "figure",
        _legend(names) if len(names) > 1 else Html(),
        _framed(drawn, [(show(tick), down(tick)) for tick in ticks], span_s, label=_spoken(known, show)),
    )


def stacked_phases(points: Sequence[tuple[float, dict[str, float]]], *, span_s: float, label: str) -> Html:
    """Shares of the step over time, one upon the other; a silence of the job is a gap."""
    drawn = []
    for run in _together(points):
        base = [0.0] * len(run)
        across = [_across(time_s, span_s) for time_s, _ in run]
        if len(run) == 1:  # a point alone is a column, or it would not be seen
            run, base, across = run * 2, base * 2, [across[0] - 1.5, across[0] + 1.5]
        for phase in PHASES:
            over = [low + shares.get(phase, 0.0) for low, (_, shares) in zip(base, run, strict=True)]
            if over != base:
                outline = [*zip(across, over, strict=True), *reversed([*zip(across, base, strict=True)])]
                corners = " ".join(f"{x:.1f},{PAD + HEIGHT * (1 - y):.1f}" for x, y in outline)
                drawn.append(tag("polygon", points=corners, class_=phase))
            base = over
    seen = [phase for phase in PHASES if any(shares.get(phase) for _, shares in points)]
    levels = [(show_share(level), PAD + HEIGHT * (1 - level)) for level in (0.0, 0.5, 1.0)]
    legend = tag("ul", *(tag("li", tag("i", class_=phase), phase) for phase in seen), class_="legend")
    return tag("figure", legend, _framed(drawn, levels, span_s, label=label))


def strip(stretches: Sequence[Stretch], *, start_s: float, span_s: float) -> Html:
    """What bounded the run over time, a coloured cell per stretch."""
    cells = []
    for stretch in stretches:
        left, right = (_across(time_s - start_s, span_s) for time_s in (stretch.start_s, stretch.end_s))
        verdict = stretch.verdict
        words = "too little to say" if verdict is None else f"{verdict.bound}: {verdict.sentence}"
        cells.append(
            tag(
                "rect",
                tag("title", f"{show_time(stretch.start_s - start_s)}: {words}"),
                x=round(left, 2),
                width=round(max(right - left, 1.0), 2),
                y=0,
                height=24,
                class_="bound-unknown" if verdict is None else f"bound-{verdict.bound}",
            )
        )
    seen = dict.fromkeys(stretch.verdict.bound for stretch in stretches if stretch.verdict is not None)
    legend = tag("ul", *(tag("li", tag("i", class_=f"bound-{b}"), b) for b in seen), class_="legend")
    bar = tag(
        "svg",
        *cells,
        width="100%",
        height=24,
        viewBox=f"0 0 {WIDTH:.0f} 24",
        preserveAspectRatio="none",
        role="img",
        aria_label="what bounded the run over time: " + ", ".join(seen),
    )
    return tag("figure", legend, tag("div", tag("span"), bar, tag("span"), _times(span_s), class_="curve"))


# Parts


def _framed(drawn: Sequence[Html], levels: Sequence[tuple[str, float]], span_s: float, *, label: str) -> Html:
    """The drawing with its axes: levels to the left, times below."""
    height = HEIGHT + 2 * PAD
    axis = [tag("text", text, x=58, y=round(y + 4, 1), text_anchor="end") for text, y in levels]
    return tag(
        "div",
        tag("svg", *axis, class_="axis", width=62, height=height, aria_hidden="true"),
        tag(
            "svg",
            *drawn,
            width="100%",
            height=height,
            viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
            preserveAspectRatio="none",
            role="img",
            aria_label=label,
        ),
        tag("span"),
        _times(span_s),
        class_="curve",
    )


def _times(span_s: float) -> Html:
    labels = []
    for number in range(NUM_TIMES):
        share = number / (NUM_TIMES - 1)
        anchor = "start" if number == 0 else "end" if share == 1 else "middle"
        labels.append(
            tag("text", show_time(share * span_s), x=f"{100 * share:.3f}%", y=12, text_anchor=anchor)
        )
    return tag("svg", *labels, class_="axis", width="100%", height=16, aria_hidden="true")


def show_time(seconds: float) -> str:
    """Since the run began: 0:42, 12:05, 3:20:00, 2 d 4 h."""
    whole = round(max(seconds, 0.0))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _ticks(low: float, high: float, scale: float) -> list[float]:
    if low == 0.0:
        return [tick * scale for tick in round_ticks(high / scale)]
    return [low, (low + high) / 2, high]


def _across(time_s: float, span_s: float) -> float:
    return WIDTH * min(max(time_s / span_s, 0.0), 1.0) if span_s > 0 else 0.0


Known = list[tuple[float, float]]


def _runs(series: Series) -> list[Known]:
    """Points that belong together: neither an unknown value nor a long silence lies between them."""
    runs: list[Known] = []
    for group in _together(series.points):
        run: Known = []
        for time_s, value in group:
            if value is not None and math.isfinite(value):
                run.append((time_s, value))
            elif run:
                runs.append(run)
                run = []
        runs.append(run)
    return [run for run in runs if run]


def _together(points: Sequence[tuple[float, Value]]) -> list[list[tuple[float, Value]]]:
    """Points without a silence between them."""
    steps = sorted(later[0] - earlier[0] for earlier, later in itertools.pairwise(points))
    longest_s = SEPARATED_BY * steps[len(steps) // 2] if steps else 0.0
    groups: list[list[tuple[float, Value]]] = []
    for point in points:
        if groups and point[0] - groups[-1][-1][0] <= longest_s:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _path(run: Known, span_s: float, down: Callable[[float], float]) -> str:
    if len(run) == 1:  # a point alone is a short dash, or it would not be seen
        x, y = _across(run[0][0], span_s), down(run[0][1])
        return f"{x - 1.5:.2f},{y:.2f} {x + 1.5:.2f},{y:.2f}"
    return " ".join(f"{_across(time_s, span_s):.2f},{down(value):.2f}" for time_s, value in run)


def _titles(series: Sequence[Series], span_s: float, show: Callable[[float], str]) -> list[Html]:
    """Columns without a colour that say what stands above them."""
    times = [time_s for time_s, _ in series[0].points]
    size = math.ceil(len(times) / MOST_TITLES)
    found = []
    for number in range(0, len(times), size):
        right = _across(times[min(number + size, len(times) - 1)], span_s)
        left = _across(times[number], span_s)
        said = [
            f"{each.name} {show(value)}"
            for each in series
            if number < len(each.points) and (value := each.points[number][1]) is not None
        ]
        if said:
            words = tag("title", f"{show_time(times[number])}  {', '.join(said)}")
            width = round(max(right - left, 2.0), 2)
            found.append(
                tag(
                    "rect", words, x=round(left, 2), width=width, y=0, height=HEIGHT + 2 * PAD, class_="hover"
                )
            )
    return found


def _legend(names: Sequence[tuple[str, str]]) -> Html:
    return tag("ul", *(tag("li", tag("i", class_=colour), name) for name, colour in names), class_="legend")


def _spoken(series: Sequence[Series], show: Callable[[float], str]) -> str:
    said = []
    for each in series:
        values = [value for _, value in each.points if value is not None and math.isfinite(value)]
        said.append(f"{each.name} between {show(min(values))} and {show(max(values))}")
    return "; ".join(said)
