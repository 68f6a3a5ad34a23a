"""The drawings of a report's page: scores as dots, matrices as coloured tables, confidence as bars.

Positions across are percentages and positions down are pixels, so that a drawing fills a phone and a sheet of
paper alike while its text keeps its size.  Colours are classes; the style sheet owns them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.engines.adapters.evaluation.results import ConfidenceBin, Evaluation, RoutingQuality
from flatout.page.markup import Html, tag
from flatout.units import UNKNOWN, show_share

BARS_PX, BARS_LEFT_PCT = 150, 11.0
FOOT_PX = 34  # under the bars, for the numbers and the name of the axis
PALEST, DARKEST = 0.04, 0.72  # how much colour the smallest and the largest value of a matrix get

# From the back to the front: what is drawn last must not be hidden.
KINDS = ("random", "uniform", "single", "heads-only", "oracle", "routed")


def show_points(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"


def show_exact_share(share: float | None) -> str:
    """A share with a digit behind the point: between 97 % and 98 % lies what is worth knowing."""
    return UNKNOWN if share is None else "100 %" if share == 1 else f"{100 * share:.1f} %"


def dots(evaluation: Evaluation) -> Html:
    """A line from 0 to 100 points per task, with a dot for each routing."""
    found = {task: _values(evaluation, task) for task in evaluation.tasks}
    seen = [kind for kind in reversed(KINDS) if any(kind in values for values in found.values())]
    legend = tag("ul", *(tag("li", tag("i", class_=f"dot-{kind}"), kind) for kind in seen), class_="legend")
    rows = []
    for task, values in found.items():
        spoken = ", ".join(
            f"{kind} {show_points(values[kind])}" for kind in reversed(KINDS) if kind in values
        )
        marks = [tag("line", x1=_along(0), x2=_along(100), y1=13, y2=13, class_="track")]
        marks += [
            tag("line", x1=_along(tick), x2=_along(tick), y1=8, y2=18, class_="track")
            for tick in (0, 25, 50, 75, 100)
        ]
        marks += [
            tag(
                "circle",
                tag("title", f"{task}, {kind}: {show_points(values[kind])}"),
                cx=_along(values[kind]),
                cy=13,
                r=7 if kind == "oracle" else 4.5,
                class_=f"dot-{kind}",
            )
            for kind in KINDS
            if kind in values
        ]
        drawn = tag(
            "svg",
            *marks,
            width="100%",
            height=26,
            role="img",
            aria_label=f"{task}: {spoken}",
            class_="drawing",
        )
        rows.append(tag("div", tag("b", task), drawn, tag("span", evaluation.metrics[task])))
    ticks = [tag("text", str(tick), x=_along(tick), y=11, class_="middle") for tick in (0, 25, 50, 75, 100)]
    foot = tag("svg", *ticks, width="100%", height=16, aria_hidden="true", class_="drawing")
    return tag("div", legend, *rows, tag("div", tag("b"), foot, tag("span")), class_="dots")


def _values(evaluation: Evaluation, task: str) -> dict[str, float]:
    found = {
        "random": evaluation.score(task, "random"),
        "uniform": evaluation.score(task, "uniform"),
        "single": evaluation.score(task, "single"),
        "heads-only": evaluation.heads_only_score(task),
        "oracle": evaluation.score(task, "oracle"),
        "routed": evaluation.score(task, "routed"),
    }
    return {kind: value for kind, value in found.items() if value is not None}


def _along(points: float) -> str:
    return f"{2 + 0.96 * min(max(points, 0.0), 100.0):.3f}%"


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixCell:
    """One cell: what it says, what a pointer is told, and how much colour it gets, 0 to 1."""

    text: str
    title: str
    strength: float
    is_own: bool  # on the diagonal, where row and column are the same task


def matrix(
    rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[MatrixCell]], *, corner: str
) -> Html:
    """A table whose cells are coloured; it scrolls inside itself where it is too wide."""
    head = tag("tr", tag("th", corner), *(tag("th", name, scope="col") for name in columns))
    body = [
        tag("tr", tag("th", name, scope="row"), *(_cell(cell) for cell in line))
        for name, line in zip(rows, cells, strict=True)
    ]
    whole = tag("table", tag("thead", head), tag("tbody", *body), class_="matrix")
    return tag("div", whole, class_="scroll")


def _cell(cell: MatrixCell) -> Html:
    amount = PALEST + (DARKEST - PALEST) * min(max(cell.strength, 0.0), 1.0)
    return tag(
        "td",
        cell.text,
        title=cell.title,
        class_="own" if cell.is_own else "foreign",
        style=f"--amount: {100 * amount:.0f}%" if cell.strength > 0 else None,
    )


def confusion(quality: RoutingQuality, tasks: Sequence[str]) -> Html:
    """Where the rows of each task went."""
    lines = []
    for task, counts in zip(tasks, quality.confusion, strict=True):
        total = sum(counts)
        lines.append(
            [
                MatrixCell(
                    text=show_exact_share(count / total) if count else "·",
                    title=f"{count} of {total} rows of {task} went to {adapter}",
                    # A few rows gone astray are what the reader looks for: they get more than their share.
                    strength=math.sqrt(count / total) if total else 0.0,
                    is_own=adapter == task,
                )
                for adapter, count in zip(tasks, counts, strict=True)
            ]
        )
    return matrix(tasks, tasks, lines, corner="rows of ↓ sent to →")


def transfer(evaluation: Evaluation) -> Html | None:
    """Each task's score with all of its rows under one adapter; None where no two adapters were tried."""
    adapters = [name for name in evaluation.tasks if name in evaluation.adapters]
    if len(adapters) < 2:
        return None
    lines = []
    for task in evaluation.tasks:
        own = evaluation.score(task, "oracle")
        values = [evaluation.score(task, "single", adapter=adapter) for adapter in adapters]
        lines.append(
            [
                MatrixCell(
                    text=show_points(value),
                    title=f"{task} under the adapter of {adapter}: {show_points(value)}",
                    strength=1.0 if adapter == task else _lost_share(value, own),
                    is_own=adapter == task,
                )
                for adapter, value in zip(adapters, values, strict=True)
            ]
        )
    return matrix(evaluation.tasks, adapters, lines, corner="score of ↓ under →")


def _lost_share(value: float | None, own: float | None) -> float:
    """How much of a task's own score is gone."""
    return (own - value) / own if value is not None and own is not None and own > 0 else 0.0


def confidence_bars(quality: RoutingQuality) -> Html:
    """How many rows have which confidence: those routed rightly at the bottom, the others on top."""
    most = max((each.num_rows for each in quality.bins), default=0) or 1
    parts = _frame([(0.0, "0"), (0.5, f"{most // 2:,}"), (1.0, f"{most:,}")])
    for each in quality.bins:
        words = (
            f"confidence {each.low:.1f} to {each.high:.1f}: {each.num_rows:,} rows, "
            f"{each.num_right:,} routed rightly"
        )
        base = 0.0
        for number, kind in ((each.num_right, "right"), (each.num_rows - each.num_right, "wrong")):
            if number:
                parts.append(_bar(each, base, number / most, words, kind))
            base += number / most
    if quality.threshold > 0:
        x = _across(quality.threshold)
        parts.append(
            tag(
                "line",
                tag("title", f"threshold {quality.threshold:g}"),
                x1=x,
                x2=x,
                y1=0,
                y2=BARS_PX,
                class_="same",
            )
        )
    names = (("right", "routed rightly"), ("wrong", "wrongly"))
    legend = tag("ul", *(tag("li", tag("i", class_=kind), name) for kind, name in names), class_="legend")
    label = "; ".join(f"{each.low:.1f} to {each.high:.1f}: {each.num_rows} rows" for each in quality.bins)
    return tag("figure", legend, _drawn(parts, label=f"rows by confidence: {label}"))


def reliability(quality: RoutingQuality) -> Html:
    """The share that is right over the confidence: on the dashed line, confidence is true."""
    parts = _frame([(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")])
    parts.append(tag("line", x1=_across(0), x2=_across(1), y1=BARS_PX, y2=0, class_="same"))
    most = max((each.num_rows for each in quality.bins), default=0) or 1
    said = []
    for each in quality.bins:
        if each.mean_confidence is None or each.right_share is None:
            continue
        words = f"{each.num_rows:,} rows at {each.mean_confidence:.2f}: {show_share(each.right_share)} right"
        said.append(words)
        parts.append(
            tag(
                "circle",
                tag("title", words),
                cx=_across(each.mean_confidence),
                cy=round(BARS_PX * (1 - each.right_share), 2),
                r=round(3 + 5 * (each.num_rows / most) ** 0.5, 2),
                class_="dot-routed",
            )
        )
    return tag("figure", _drawn(parts, label="share that is right by confidence: " + "; ".join(said)))


def load_bars(quality: RoutingQuality) -> Html:
    """What each adapter was needed for and what it got, as shares of all rows."""
    most = max([*quality.needed_share.values(), *quality.used_share.values(), 1e-9])
    rows = []
    for name, needed in quality.needed_share.items():
        used = quality.used_share.get(name, 0.0)
        bars = [
            tag("rect", x=0, y=y, width=f"{100 * share / most:.3f}%", height=8, class_=kind)
            for share, y, kind in ((needed, 3, "needed"), (used, 13, "used"))
        ]
        words = f"needed {show_share(needed)}, used {show_share(used)}"
        drawn = tag(
            "svg",
            tag("title", words),
            *bars,
            width="100%",
            height=24,
            role="img",
            aria_label=f"{name}: {words}",
            class_="drawing",
        )
        rows.append(
            tag(
                "div",
                tag("b", name),
                drawn,
                tag("span", f"{show_exact_share(needed)} → {show_exact_share(used)}"),
            )
        )
    names = (("needed", "rows that need it"), ("used", "weight it got"))
    legend = tag("ul", *(tag("li", tag("i", class_=kind), name) for kind, name in names), class_="legend")
    return tag("div", legend, *rows, class_="dots")


def _frame(levels: Sequence[tuple[float, str]]) -> list[Html]:
    parts = []
    for level, text in levels:
        y = round(BARS_PX * (1 - level), 2)
        parts.append(tag("line", x1=_across(0), x2=_across(1), y1=y, y2=y, class_="track"))
        parts.append(tag("text", text, x=f"{BARS_LEFT_PCT - 1.5:.3f}%", y=y + 4, class_="end"))
    parts += [
        tag("text", f"{value:g}", x=_across(value), y=BARS_PX + 16, class_="middle")
        for value in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    ]
    parts.append(tag("text", "confidence", x=_across(0.5), y=BARS_PX + 32, class_="middle"))
    return parts


def _bar(each: ConfidenceBin, base: float, size: float, words: str, kind: str) -> Html:
    height = BARS_PX * size
    return tag(
        "rect",
        tag("title", words),
        x=_across(each.low + 0.004),
        width=f"{(98 - BARS_LEFT_PCT) * (each.high - each.low - 0.008):.3f}%",
        y=round(BARS_PX * (1 - base) - height, 2),
        height=round(height, 2),
        class_=kind,
    )


def _drawn(parts: Sequence[Html], *, label: str) -> Html:
    # The first text stands on the upper edge, so the drawing begins above it.
    inner = tag("svg", *parts, y=8, overflow="visible")
    return tag(
        "svg",
        inner,
        width="100%",
        height=BARS_PX + 8 + FOOT_PX,
        role="img",
        aria_label=label,
        class_="drawing",
    )


def _across(value: float) -> str:
    return f"{BARS_LEFT_PCT + (98 - BARS_LEFT_PCT) * value:.3f}%"
