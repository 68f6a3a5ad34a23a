"""A study as one PNG or SVG picture, for a paper, a ticket or a chat."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from flatout.atomic_files import write_whole
from flatout.engines.steering.report.grid import Grid, grid
from flatout.engines.steering.report.record import StudyRecord
from flatout.errors import BadInput, import_extra
from flatout.page.printable import printable
from flatout.units import UNKNOWN

SUFFIXES = (".png", ".svg")
INK, SOFT, UP, DOWN = "#1d1d1b", "#66645e", "#a33a1e", "#3c69ab"
LONGEST_TITLE = 90


def plot_study(record: StudyRecord, path: Path) -> Path:
    """Heat map, trade-off and retest side by side, in a file by the suffix of `path`."""
    if path.suffix.lower() not in SUFFIXES:
        raise BadInput(f"{path} is neither a .png nor a .svg file", hint="give one of these endings")
    figures = import_extra("matplotlib.figure", extra="plots")
    canvas = import_extra("matplotlib.backends.backend_agg", extra="plots")
    baseline = record.baseline_score or 0.0
    drawn = grid(record.trials, baseline=baseline)
    height = 4.6 if drawn is None else min(10.0, max(4.6, 1.6 + 0.24 * len(drawn.layers)))
    figure = figures.Figure(figsize=(15, height), layout="constrained")
    canvas.FigureCanvasAgg(figure)
    figure.suptitle(_plain(f"{record.name}  ·  {record.model}"), fontsize=11, color=INK)
    map_axes, cost_axes, retest_axes = figure.subplots(1, 3, width_ratios=(1.5, 1, 0.9))
    for axes in (map_axes, cost_axes, retest_axes):
        axes.tick_params(labelsize=8, colors=SOFT)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_map(figure, map_axes, drawn, record, baseline=baseline)
    _draw_cost(cost_axes, record)
    _draw_retest(retest_axes, record)
    drawn_bytes = io.BytesIO()
    figure.savefig(drawn_bytes, dpi=130, format=path.suffix.lower()[1:])
    write_whole(path, drawn_bytes.getvalue())
    return path


def _draw_map(figure: Any, axes: Any, drawn: Grid | None, record: StudyRecord, *, baseline: float) -> None:
    axes.set_title(_plain(f"{record.score_name}, best of each cell"), fontsize=9, loc="left", color=INK)
    if drawn is None:
        _nothing(axes)
        return
    values = [[float("nan")] * drawn.num_columns for _ in drawn.layers]
    for cell in drawn.cells:
        if cell.best.score is not None:
            values[cell.row][cell.column] = cell.best.score
    reach = drawn.reach or 1.0
    rows = range(len(drawn.layers) + 1)
    mesh = axes.pcolormesh(
        drawn.edges, rows, values, cmap="RdBu_r", vmin=baseline - reach, vmax=baseline + reach
    )
    every = max(1, len(drawn.layers) // 24)
    axes.set_yticks(
        [row + 0.5 for row in range(0, len(drawn.layers), every)],
        [str(layer) for layer in drawn.layers[::every]],
    )
    axes.set_ylabel("layer", fontsize=8, color=SOFT)
    axes.set_xlabel("strength, in mean residual norms of the layer", fontsize=8, color=SOFT)
    winner = record.winner
    if winner is not None and winner.layer in drawn.layers:
        height = drawn.layers.index(winner.layer) + 0.5
        axes.plot(
            [winner.strength], [height], marker="o", markersize=9, fillstyle="none", color=INK, clip_on=False
        )
    bar = figure.colorbar(mesh, ax=axes, shrink=0.8)
    bar.ax.tick_params(labelsize=8, colors=SOFT)
    bar.outline.set_visible(False)


def _draw_cost(axes: Any, record: StudyRecord) -> None:
    axes.set_title("score against harm", fontsize=9, loc="left", color=INK)
    known = [t for t in record.trials if t.perplexity_ratio is not None and t.score is not None]
    if not known:
        _nothing(axes)
        return
    for trial in sorted(known, key=lambda trial: trial.number == record.best):
        best = trial.number == record.best
        axes.plot(
            [trial.perplexity_ratio],
            [trial.score],
            marker="o",
            markersize=8 if best else 5,
            color=UP if best else DOWN,
            alpha=1.0 if best else 0.6,
        )
    if record.baseline_score is not None:
        axes.axhline(record.baseline_score, color=SOFT, linestyle="dashed", linewidth=1)
    axes.axvline(1.0, color=SOFT, linestyle="dashed", linewidth=1)
    axes.set_xlabel("perplexity of neutral text, over the unsteered model's", fontsize=8, color=SOFT)
    axes.set_ylabel(_plain(record.score_name), fontsize=8, color=SOFT)


def _draw_retest(axes: Any, record: StudyRecord) -> None:
    retest = record.retest
    few = retest is not None and retest.difference.bounds is None
    title = "on fresh questions, too few for intervals" if few else "on fresh questions, 95 % intervals"
    axes.set_title(title, fontsize=9, loc="left", color=INK)
    if retest is None:
        _nothing(axes)
        return
    names = ("unsteered", "steered", "difference")
    for place, interval in enumerate((retest.baseline, retest.steered, retest.difference)):
        colour = UP if place == 2 and retest.is_certain else INK
        if interval.bounds is not None:
            axes.plot(interval.bounds, [place, place], color=colour, linewidth=2)
        axes.plot([interval.value], [place], marker="o", color=colour)
    axes.axvline(0.0, color=SOFT, linestyle="dashed", linewidth=1)
    axes.set_yticks(range(3), names)
    axes.set_ylim(2.6, -0.6)
    axes.set_xlabel(_plain(f"{record.score_name}, {retest.num_questions} questions"), fontsize=8, color=SOFT)


def _plain(text: str) -> str:
    """Text as it stands: matplotlib would read a dollar sign as mathematics."""
    return printable(text)[:LONGEST_TITLE].replace("$", r"\$")


def _nothing(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, UNKNOWN, transform=axes.transAxes, color=SOFT, horizontalalignment="center")
