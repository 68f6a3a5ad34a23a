"""The charts of a study: heat map, trade-off and intervals, for its page and its figure file."""

from __future__ import annotations

import math
from pathlib import Path

from flatout.engines.steering.report.grid import Grid, grid
from flatout.engines.steering.report.record import Interval, Retest, StudyRecord, TrialRecord
from flatout.page.charts import Cell, Drawing, Frame, Mark, Matrix, Row, Rows, scatter
from flatout.page.figures import write_figure
from flatout.page.scales import round_scale

MOST_NUMBERED_COLUMNS = 13
PALEST = 0.03  # of a cell that scores like the unsteered model


def show_score(value: float) -> str:
    return f"{value:.3g}" if abs(value) >= 0.01 or value == 0 else f"{value:.1e}"


def show_interval(interval: Interval, *, signed: bool = True) -> str:
    """A difference with its sign, a score without."""
    sign = "+" if signed else ""
    if interval.bounds is None:
        return f"{interval.value:{sign}.3f} (too few for an interval)"
    low, high = interval.bounds
    return f"{interval.value:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def describe(trial: TrialRecord) -> str:
    """A configuration in words."""
    return f"layer {trial.layer}, {trial.method}, strength {trial.strength:+.3g}, {trial.where}"


def heat_map(drawn: Grid, *, baseline: float, winner: int | None) -> Matrix:
    """The best trial of each cell: layers from the bottom up, strengths from left to right."""
    cells: list[list[Cell | None]] = [[None] * drawn.num_columns for _ in drawn.layers]
    for found in drawn.cells:
        score = found.best.score if found.best.score is not None else baseline
        distance = score - baseline
        spoken = f"{describe(found.best)}: {show_score(score)}"
        cells[found.row][found.column] = Cell(
            text=f"{score:.2f}" if drawn.num_columns <= MOST_NUMBERED_COLUMNS else "",
            title=spoken + (f", best of {len(found.numbers)}" if len(found.numbers) > 1 else ""),
            colour="up" if distance >= 0 else "down",
            strength=PALEST + (1 - PALEST) * (abs(distance) / drawn.reach if drawn.reach else 0.0),
            is_outlined=winner in found.numbers,
        )
    every = max(1, math.ceil(len(drawn.layers) / 40))
    names = [str(layer) if row % every == 0 else "" for row, layer in enumerate(drawn.layers)]
    return Matrix(
        label=f"best score by layer and strength, {len(drawn.cells)} cells",
        rows=tuple(reversed(names)),
        cells=tuple(map(tuple, reversed(cells))),
        edges=tuple(f"{edge:g}" for edge in drawn.edges),
        corner="layer",
        name_across="strength",
    )


def trade_off(record: StudyRecord) -> Drawing | None:
    """Score against the perplexity of neutral text: what a vector gains, and what it breaks."""
    known = [
        (trial, trial.perplexity_ratio, trial.score)
        for trial in record.trials
        if trial.perplexity_ratio is not None and trial.score is not None
    ]
    if not known:
        return None
    ratios = [1.0, *(ratio for _, ratio, _ in known)]
    scores = [score for _, _, score in known]
    scores += [record.baseline_score] if record.baseline_score is not None else []
    across = round_scale(min(ratios), max(ratios), lambda ratio: f"{ratio:g}×")
    up = round_scale(min(scores), max(scores), show_score)
    dots = []
    for trial, ratio, score in sorted(known, key=lambda each: each[0].number == record.best):
        is_best = trial.number == record.best
        dots.append(
            Mark(
                shape="dot",
                at=((ratio, score),),
                colour="up" if is_best else "down",
                size=6 if is_best else 4,
                opacity=1.0 if is_best else 0.65,
                title=f"{describe(trial)}: score {show_score(score)}, perplexity {ratio:.3g}×",
            )
        )
    frame = Frame(across=across, up=up, height=240)
    rules = [((1.0, up.low), (1.0, up.high))]
    if record.baseline_score is not None:
        rules.append(((across.low, record.baseline_score), (across.high, record.baseline_score)))
    lines = [Mark(shape="line", at=at, colour="soft", dashed=True) for at in rules]
    label = f"score against perplexity of neutral text, {len(known)} trials"
    return scatter([*lines, *dots], frame, label=label)


def intervals(retest: Retest) -> Rows:
    """Unsteered, steered and their paired difference, each as a dot on its 95 % interval."""
    named = (
        ("unsteered", retest.baseline, "ink"),
        ("steered", retest.steered, "ink"),
        ("difference, paired", retest.difference, "up" if retest.is_certain else "ink"),
    )
    ends = [0.0] + [end for _, each, _ in named for end in (each.value, *(each.bounds or ()))]
    chart = Rows(across=round_scale(min(ends), max(ends)))
    rows = []
    for name, interval, colour in named:
        figure = show_interval(interval, signed=interval is retest.difference)
        marks = [chart.track(), chart.rule(0.0, dashed=True)]
        if interval.bounds is not None:
            marks += chart.interval(*interval.bounds, colour)
        marks.append(chart.dot(interval.value, colour))
        rows.append(Row(name=name, marks=tuple(marks), label=f"{name}: {figure}", figure=figure))
    return Rows(rows=tuple(rows), across=chart.across)


def plot_study(record: StudyRecord, path: Path) -> Path:
    """Draw heat map, trade-off and retest into a PNG or SVG file."""
    baseline = record.baseline_score or 0.0
    drawn = grid(record.trials, baseline=baseline)
    retest = record.retest
    few = retest is not None and retest.difference.bounds is None
    panels = {
        f"{record.score_name}, best of each cell; strength in mean residual norms of the layer": None
        if drawn is None
        else heat_map(drawn, baseline=baseline, winner=record.best),
        "score against perplexity of neutral text, steered over unsteered": trade_off(record),
        f"on fresh questions, {'too few for intervals' if few else '95 % intervals'}": None
        if retest is None
        else intervals(retest),
    }
    return write_figure(path, panels, title=f"{record.name}  ·  {record.model}")
