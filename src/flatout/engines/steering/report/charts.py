"""The charts of a study: heat map, trade-off and intervals, for its page and its figure file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.engines.steering.report.record import Retest, StudyRecord, TrialRecord
from flatout.page.charts import Axes, Cell, ChartRow, Drawing, Mark, Matrix, RowChart, scatter
from flatout.page.figures import write_figure
from flatout.page.scales import round_scale, round_step

MOST_COLUMNS = 13
FINEST = 1e-6  # strengths that differ by less are one strength
PALEST = 0.03  # of a cell that scores like the unsteered model


def show_score(value: float) -> str:
    return f"{value:.3g}" if abs(value) >= 0.01 or value == 0 else f"{value:.1e}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Scored trials by (layer, column); columns of strengths lie between `edges`."""

    edges: tuple[float, ...]
    trials: dict[tuple[int, int], list[TrialRecord]]

    def best(self, place: tuple[int, int]) -> TrialRecord:
        """Return the best of the trials that were asked the most questions: few may score by luck."""
        return max(self.trials[place], key=lambda trial: (trial.num_questions or 0, trial.score or 0.0))


def group_trials(trials: Sequence[TrialRecord]) -> Grid | None:
    """Group trials by layer and strength; None where no trial has a score.

    A search draws strengths from a line, so no two trials share one: the line is cut into columns of equal
    width, with zero on a border.
    """
    scored = [trial for trial in trials if trial.score is not None and math.isfinite(trial.strength)]
    if not scored:
        return None
    edges = _edges([trial.strength for trial in scored])
    found: dict[tuple[int, int], list[TrialRecord]] = {}
    for trial in scored:
        inside = (
            sum(edge <= trial.strength for edge in edges) - 1
        )  # the last column holds its right border too
        found.setdefault((trial.layer, min(max(inside, 0), len(edges) - 2)), []).append(trial)
    return Grid(edges=edges, trials=found)


def _edges(strengths: Sequence[float]) -> tuple[float, ...]:
    """Return the borders of columns, multiples of one round step, around all strengths."""
    low, high = min(strengths), max(strengths)
    wide = (high - low) / (MOST_COLUMNS - 2) if high - low > FINEST else abs(high)
    step = round_step(wide if wide > FINEST else 1.0)
    first, last = math.floor(low / step), math.ceil(high / step)
    if high >= last * step:
        last += 1
    return tuple(round(number * step, 12) for number in range(first, last + 1))


def heat_map(record: StudyRecord) -> tuple[Matrix, float] | None:
    """Draw layers from the bottom up, strengths from left to right; and return the largest distance.

    The colour of a cell is its distance from the unsteered model, in both directions alike.
    """
    grid = group_trials(record.trials)
    if grid is None:
        return None
    best = {place: grid.best(place) for place in grid.trials}
    far = {place: (trial.score or 0.0) - (record.baseline_score or 0.0) for place, trial in best.items()}
    reach = max(map(abs, far.values()))

    def cell(place: tuple[int, int]) -> Cell | None:
        if place not in best:
            return None
        several, score = grid.trials[place], best[place].score or 0.0
        return Cell(
            text=f"{score:.2f}",
            title=f"{best[place].describe()}: {show_score(score)}"
            + (f", best of {len(several)}" if len(several) > 1 else ""),
            colour="up" if far[place] >= 0 else "down",
            strength=PALEST + (1 - PALEST) * (abs(far[place]) / reach if reach else 0.0),
            is_outlined=any(trial.number == record.best for trial in several),
        )

    layers = sorted({layer for layer, _ in best}, reverse=True)
    columns, every = range(len(grid.edges) - 1), math.ceil(len(layers) / 40)
    matrix = Matrix(
        label=f"best score by layer and strength, {len(best)} cells",
        rows=tuple(str(layer) if row % every == 0 else "" for row, layer in enumerate(layers)),
        cells=tuple(tuple(cell((layer, column)) for column in columns) for layer in layers),
        edges=tuple(f"{edge:g}" for edge in grid.edges),
        corner="layer",
        name_across="strength",
    )
    return matrix, reach


def trade_off(record: StudyRecord) -> Drawing | None:
    """Draw score against the perplexity of neutral text: what a vector gains, and what it breaks."""
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
                title=f"{trial.describe()}: score {show_score(score)}, perplexity {ratio:.3g}×",
            )
        )
    axes = Axes(across=across, up=up, height=240)
    rules = [((1.0, up.low), (1.0, up.high))]
    if record.baseline_score is not None:
        rules.append(((across.low, record.baseline_score), (across.high, record.baseline_score)))
    lines = [Mark(shape="line", at=at, colour="soft", dashed=True) for at in rules]
    label = f"score against perplexity of neutral text, {len(known)} trials"
    return scatter([*lines, *dots], axes, label=label)


def intervals(retest: Retest) -> RowChart:
    """Draw unsteered, steered and their paired difference, each as a dot on its 95 % interval."""
    named = (
        ("unsteered", retest.baseline, "ink"),
        ("steered", retest.steered, "ink"),
        ("difference, paired", retest.difference, "up" if retest.is_certain else "ink"),
    )
    ends = [0.0] + [end for _, each, _ in named for end in (each.value, *(each.bounds or ()))]
    chart = RowChart(across=round_scale(min(ends), max(ends)))
    rows = []
    for name, interval, colour in named:
        figure = interval.show(signed=interval is retest.difference)
        marks = [chart.track(), chart.rule(0.0, dashed=True)]
        if interval.bounds is not None:
            marks += chart.interval(*interval.bounds, colour)
        marks.append(chart.dot(interval.value, colour))
        rows.append(ChartRow(name=name, marks=tuple(marks), label=f"{name}: {figure}", figure=figure))
    return RowChart(rows=tuple(rows), across=chart.across)


def plot_study(record: StudyRecord, path: Path) -> Path:
    """Draw heat map, trade-off and retest into a PNG or SVG file."""
    drawn, retest = heat_map(record), record.retest
    few = retest is not None and retest.difference.bounds is None
    cells = f"{record.score_name}, best of each cell; strength in mean residual norms of the layer"
    fresh = f"on fresh questions, {'too few for intervals' if few else '95 % intervals'}"
    panels = {
        cells: drawn[0] if drawn else None,
        "score against perplexity of neutral text, steered over unsteered": trade_off(record),
        fresh: intervals(retest) if retest else None,
    }
    return write_figure(path, panels, title=f"{record.name}  ·  {record.model}")
