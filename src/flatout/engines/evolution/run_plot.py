"""A run as a picture: whether it learned, how fast it scored, and what that cost against plain inference."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flatout.atomic_files import write_whole
from flatout.engines.evolution.training.records import EpochRecord
from flatout.errors import BadInput, import_extra
from flatout.units import UNKNOWN

INK, UNTRAINED = "#222222", "#7a9a4a"
# Per panel: what its axis says, and the curves in it by name, colour and value.
PANELS: tuple[tuple[str, tuple[tuple[str, str, Callable[[EpochRecord], float | None]], ...]], ...] = (
    (
        "reward",
        (
            ("training prompts", "#8fa9c4", lambda record: record.reward_train),
            ("held-out prompts", "#c8553d", lambda record: record.reward_heldout),
        ),
    ),
    ("rewards per second", (("rewards per second", "#3f7fb5", lambda record: record.rewards_per_s),)),
    ("share of plain inference", (("share of plain inference", "#e8943a", lambda r: r.plain_share),)),
)


def plot_run(records: Sequence[EpochRecord], path: Path, *, title: str = "") -> Path:
    """Draw the curves of a run into a PNG file; a curve that is nowhere known is named as such."""
    if path.suffix.lower() != ".png":
        raise BadInput(f"{path} is no .png file", hint="give this ending")
    if not records:
        raise BadInput("the run has no epoch to draw", hint="let it finish one")
    figures = import_extra("matplotlib.figure", extra="plots")
    canvas = import_extra("matplotlib.backends.backend_agg", extra="plots")
    figure = figures.Figure(figsize=(9, 8), layout="constrained")
    canvas.FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, (label, curves) in zip(all_axes, PANELS, strict=True):
        for name, colour, value_of in curves:
            _draw_curve(axes, records, name=name, colour=colour, value_of=value_of)
        axes.set_ylabel(label, color=INK)
        if label != "reward":
            axes.set_ylim(bottom=0)  # of a speed, zero is part of the picture
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if label == "reward":
            _draw_untrained(axes, records[0])
            axes.legend(frameon=False, loc="best")
    all_axes[-1].set_xlabel("epoch", color=INK)
    figure.suptitle(title, color=INK)
    _save(figure, path)
    return path


def _draw_untrained(axes: Any, first: EpochRecord) -> None:
    """Where the model stood before it learned anything."""
    if first.epoch == 0 and first.reward_heldout is not None:
        axes.axhline(
            first.reward_heldout, color=UNTRAINED, linestyle="dashed", linewidth=1.5, label="untrained"
        )


def _draw_curve(
    axes: Any,
    records: Sequence[EpochRecord],
    *,
    name: str,
    colour: str,
    value_of: Callable[[EpochRecord], float | None],
) -> None:
    # Epochs without a value are left out, so that evaluations made now and then are joined to a line.
    points = [(record.epoch, value) for record in records if (value := value_of(record)) is not None]
    label = name if points else f"{name}: {UNKNOWN}"
    marker = "o" if len(points) < 40 else None
    axes.plot(*(zip(*points, strict=True) if points else ([], [])), color=colour, label=label, marker=marker)
    if not points and not axes.get_lines()[:-1]:
        axes.set_yticks([])
        axes.text(0.5, 0.5, UNKNOWN, transform=axes.transAxes, color=INK, horizontalalignment="center")


def _save(figure: Any, path: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format="png")
    write_whole(path, drawn.getvalue())
