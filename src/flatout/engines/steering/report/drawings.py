"""The drawings of a report's page: heat map, trade-off and intervals, as SVG.

Positions across are percentages and positions down are pixels, so that a drawing fills a phone and a sheet of
paper alike while its text keeps its size.  Colours are classes; the style sheet owns them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatout.engines.steering.report.grid import Cell, Grid, round_step
from flatout.engines.steering.report.record import Interval, Retest, StudyRecord, TrialRecord
from flatout.page.markup import Html, tag

ROW_PX, LEFT_PCT = 20, 9.0
HEAD_PX = 18  # above the rows of the heat map, for the name of their axis
SCATTER_PX = 260
PALEST = 0.06  # opacity of a cell that scores like the unsteered model
MOST_NUMBERED_COLUMNS = 13


def show_score(value: float) -> str:
    return f"{value:.3g}" if abs(value) >= 0.01 or value == 0 else f"{value:.1e}"


def describe(trial: TrialRecord) -> str:
    """A configuration in words."""
    return f"layer {trial.layer}, {trial.method}, strength {trial.strength:+.3g}, {trial.where}"


def heat_map(drawn: Grid, *, baseline: float, winner: int | None) -> Html:
    """Layers from the bottom up, strengths from left to right."""
    num_rows, num_columns = len(drawn.layers), drawn.num_columns
    width = (100 - LEFT_PCT) / num_columns
    height = num_rows * ROW_PX
    parts = [
        tag(
            "rect",
            x=f"{LEFT_PCT:.3f}%",
            y=HEAD_PX,
            width=f"{100 - LEFT_PCT:.3f}%",
            height=height,
            class_="empty",
        )
    ]
    for cell in drawn.cells:
        parts += _cell(cell, drawn, width=width, baseline=baseline, winner=winner)
    every = max(1, math.ceil(num_rows / 40))
    for row, layer in enumerate(drawn.layers):
        if row % every == 0:
            y = HEAD_PX + (num_rows - row - 0.5) * ROW_PX + 4
            parts.append(tag("text", str(layer), x=f"{LEFT_PCT - 1.2:.3f}%", y=y, class_="end"))
    for number, edge in enumerate(drawn.edges):
        anchor = "end" if number == num_columns else "middle"
        x = f"{LEFT_PCT + number * width:.3f}%"
        parts.append(tag("text", f"{edge:g}", x=x, y=HEAD_PX + height + 16, class_=anchor))
    parts.append(tag("text", "layer", x=f"{LEFT_PCT - 1.2:.3f}%", y=11, class_="end"))
    middle = f"{(100 + LEFT_PCT) / 2:.3f}%"
    parts.append(tag("text", "strength", x=middle, y=HEAD_PX + height + 34, class_="middle"))
    label = f"best score by layer and strength, {len(drawn.cells)} cells"
    return tag(
        "svg",
        *parts,
        width="100%",
        height=HEAD_PX + height + 40,
        role="img",
        aria_label=label,
        class_="drawing",
    )


def _cell(cell: Cell, drawn: Grid, *, width: float, baseline: float, winner: int | None) -> list[Html]:
    score = cell.best.score if cell.best.score is not None else baseline
    distance = score - baseline
    strength = abs(distance) / drawn.reach if drawn.reach else 0.0
    x, y = LEFT_PCT + cell.column * width, HEAD_PX + (len(drawn.layers) - cell.row - 1) * ROW_PX
    spoken = f"{describe(cell.best)}: {show_score(score)}"
    spoken += f", best of {len(cell.numbers)}" if len(cell.numbers) > 1 else ""
    box: dict[str, str | int] = {"x": f"{x:.3f}%", "y": y, "width": f"{width:.3f}%", "height": ROW_PX}
    parts = [
        tag(
            "rect",
            tag("title", spoken),
            **box,
            class_="up" if distance >= 0 else "down",
            fill_opacity=round(PALEST + (0.85 - PALEST) * strength, 3),
        )
    ]
    if drawn.num_columns <= MOST_NUMBERED_COLUMNS:
        parts.append(tag("text", f"{score:.2f}", x=f"{x + width / 2:.3f}%", y=y + 14, class_="cell"))
    if winner in cell.numbers:
        parts.append(tag("rect", **box, class_="winner"))
    return parts


def trade_off(record: StudyRecord) -> Html | None:
    """Score against the perplexity of neutral text: what a vector gains, and what it breaks."""
    known = [
        (trial, trial.perplexity_ratio, trial.score)
        for trial in record.trials
        if trial.perplexity_ratio is not None and trial.score is not None
    ]
    if not known:
        return None
    ratios = [ratio for _, ratio, _ in known] + [1.0]
    scores = [score for _, _, score in known]
    scores += [record.baseline_score] if record.baseline_score is not None else []
    x_ticks, y_ticks = ticks(min(ratios), max(ratios)), ticks(min(scores), max(scores))

    def across(ratio: float) -> str:
        return f"{LEFT_PCT + (97 - LEFT_PCT) * _along(ratio, x_ticks):.3f}%"

    def down(score: float) -> float:
        return round(SCATTER_PX * (1 - _along(score, y_ticks)) + 8, 2)

    parts: list[Html] = []
    for tick in y_ticks:
        parts.append(tag("line", x1=f"{LEFT_PCT}%", x2="97%", y1=down(tick), y2=down(tick), class_="tick"))
        parts.append(
            tag("text", show_score(tick), x=f"{LEFT_PCT - 1.2:.3f}%", y=down(tick) + 4, class_="end")
        )
    bottom = SCATTER_PX + 8
    parts += [tag("text", f"{tick:g}×", x=across(tick), y=bottom + 18, class_="middle") for tick in x_ticks]
    if record.baseline_score is not None:
        level = down(record.baseline_score)
        parts.append(tag("line", x1=f"{LEFT_PCT}%", x2="97%", y1=level, y2=level, class_="same"))
    for trial, ratio, score in sorted(known, key=lambda each: each[0].number == record.best):
        words = f"{describe(trial)}: score {show_score(score)}, perplexity {ratio:.3g}×"
        kind, size = ("best", 6) if trial.number == record.best else ("trial", 4)
        parts.append(
            tag("circle", tag("title", words), cx=across(ratio), cy=down(score), r=size, class_=kind)
        )
    label = f"score against perplexity of neutral text, {len(known)} trials"
    return tag(
        "svg", *parts, width="100%", height=bottom + 26, role="img", aria_label=label, class_="drawing"
    )


def intervals(retest: Retest) -> Html:
    """Unsteered, steered and their paired difference, each as a dot on its 95 % interval."""
    rows = (
        ("unsteered", retest.baseline, "mean"),
        ("steered", retest.steered, "mean"),
        ("difference, paired", retest.difference, "certain" if retest.is_certain else "mean"),
    )
    ends = [0.0] + [end for _, each, _ in rows for end in (each.value, *(each.bounds or ()))]
    scale = ticks(min(ends), max(ends))
    parts: list[Html] = []
    for name, interval, kind in rows:
        words = show_interval(interval, signed=interval is retest.difference)
        drawn = _whisker(f"{name}: {words}", interval, scale=scale, kind=kind)
        parts.append(tag("div", tag("b", name), drawn, tag("span", words)))
    axis = [
        tag("text", f"{tick:g}", x=f"{2 + 96 * _along(tick, scale):.3f}%", y=12, class_="middle")
        for tick in scale
    ]
    foot = tag("svg", *axis, width="100%", height=16, aria_hidden="true", class_="drawing")
    return tag("div", *parts, tag("div", tag("b"), foot, tag("span")), class_="intervals")


def show_interval(interval: Interval, *, signed: bool = True) -> str:
    """A difference with its sign, a score without."""
    sign = "+" if signed else ""
    if interval.bounds is None:
        return f"{interval.value:{sign}.3f} (too few for an interval)"
    low, high = interval.bounds
    return f"{interval.value:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def _whisker(label: str, interval: Interval, *, scale: Sequence[float], kind: str) -> Html:
    def across(value: float) -> str:
        return f"{2 + 96 * _along(value, scale):.3f}%"

    line: list[Html] = []
    if interval.bounds is not None:
        low, high = map(across, interval.bounds)
        style = "interval certain" if kind == "certain" else "interval"
        line.append(tag("line", x1=low, x2=high, y1=14, y2=14, class_=style))
    return tag(
        "svg",
        tag("line", x1="2%", x2="98%", y1=14, y2=14, class_="track"),
        tag("line", x1=across(0.0), x2=across(0.0), y1=2, y2=26, class_="same"),
        *line,
        tag("circle", cx=across(interval.value), cy=14, r=5, class_=kind),
        width="100%",
        height=28,
        role="img",
        aria_label=label,
        class_="drawing",
    )


def ticks(low: float, high: float, *, most: int = 6) -> tuple[float, ...]:
    """Round numbers that hold the range between the first and the last of them."""
    if high - low <= 1e-6 * max(1.0, abs(low), abs(high)):
        low, high = low - 0.5, high + 0.5
    step = round_step((high - low) / (most - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(number * step, 12) for number in range(first, last + 1))


def _along(value: float, scale: Sequence[float]) -> float:
    return (value - scale[0]) / (scale[-1] - scale[0])
