"""A run of adapters as one PNG or SVG picture, for a paper, a ticket or a chat: scores, confusion, curves."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.atomic_files import write_whole
from flatout.engines.adapters.evaluation.results import Evaluation
from flatout.engines.adapters.report.curves import Line, loss_line, routing_line, thinned, validation_line
from flatout.engines.adapters.report.page import RunReport
from flatout.errors import BadInput, import_extra
from flatout.page.printable import printable
from flatout.units import UNKNOWN

SUFFIXES = (".png", ".svg")
INK, SOFT = "#1d1d1b", "#66645e"
COLOURS = {
    "oracle": "#1d1d1b",
    "routed": "#a33a1e",
    "heads-only": "#d29a2a",
    "single": "#9a5a9f",
    "uniform": "#2f8f83",
    "random": "#a5a297",
}
TASK_COLOURS = ("#3c69ab", "#2f8f83", "#d29a2a", "#9a5a9f", "#a33a1e", "#86a53b")
DASHES = ("-", "--", ":")  # where lines outnumber colours
LEAST_LOSS = 1e-4  # below it a loss is drawn as if it were on its way to 0 by equal steps
LONGEST_TITLE, LONGEST_NAME = 90, 24


def plot_report(report: RunReport, path: Path) -> Path:
    """Scores and confusion above, curves of the phases below, in a file by the suffix of `path`."""
    if path.suffix.lower() not in SUFFIXES:
        raise BadInput(f"{path} is neither a .png nor a .svg file", hint="give one of these endings")
    figures = import_extra("matplotlib.figure", extra="plots")
    canvas = import_extra("matplotlib.backends.backend_agg", extra="plots")
    figure = figures.Figure(figsize=(14, 8.5), layout="constrained")
    canvas.FigureCanvasAgg(figure)
    figure.suptitle(
        _plain(f"{report.name}  ·  {report.model}", longest=LONGEST_TITLE), fontsize=11, color=INK
    )
    ((scores, confusion, routing), (losses, metrics, router)) = figure.subplots(2, 3)
    for axes in (scores, confusion, routing, losses, metrics, router):
        axes.tick_params(labelsize=8, colors=SOFT)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_scores(scores, report.evaluation)
    _draw_confusion(confusion, report.evaluation)
    _draw_curves(routing, _routing_lines(report), "routing accuracy, rows held out")
    _draw_curves(losses, _task_lines(report, "loss"), "loss of the tasks, phase 1")
    _draw_curves(metrics, _task_lines(report, None), "scores, rows held out, phase 1")
    _draw_curves(router, _router_lines(report), "losses of the router, phase 2", is_logarithmic=True)
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format=path.suffix.lower()[1:])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.getvalue())
    return path


def _draw_scores(axes: Any, evaluation: Evaluation | None) -> None:
    axes.set_title("score by routing", fontsize=9, loc="left", color=INK)
    if evaluation is None:
        _nothing(axes)
        return
    kinds = {
        "oracle": [evaluation.score(task, "oracle") for task in evaluation.tasks],
        "routed": [evaluation.score(task, "routed") for task in evaluation.tasks],
        "heads-only": [evaluation.heads_only_score(task) for task in evaluation.tasks],
        "single": [evaluation.score(task, "single") for task in evaluation.tasks],
        "uniform": [evaluation.score(task, "uniform") for task in evaluation.tasks],
        "random": [evaluation.score(task, "random") for task in evaluation.tasks],
    }
    known = {kind: values for kind, values in kinds.items() if any(value is not None for value in values)}
    thickness = 0.8 / max(len(known), 1)
    for place, (kind, values) in enumerate(known.items()):
        heights = [task + (place - (len(known) - 1) / 2) * thickness for task in range(len(values))]
        lengths = [float("nan") if value is None else value for value in values]
        axes.barh(heights, lengths, height=thickness, color=COLOURS[kind], label=kind)
    axes.set_yticks(range(len(evaluation.tasks)), [_plain(task) for task in evaluation.tasks])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    if known:
        axes.legend(frameon=False, fontsize=7)


def _draw_confusion(axes: Any, evaluation: Evaluation | None) -> None:
    axes.set_title("rows of a task by the adapter chosen", fontsize=9, loc="left", color=INK)
    if evaluation is None or evaluation.routing is None:
        _nothing(axes)
        return
    counts = evaluation.routing.confusion
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            if counts[i][j]:
                colour = "white" if share > 0.5 else INK
                axes.text(j, i, f"{100 * share:.1f} %", ha="center", va="center", fontsize=7, color=colour)
    names = [_plain(task) for task in evaluation.tasks]
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_yticks(range(len(names)), names)


def _task_lines(report: RunReport, key: str | None) -> list[Line]:
    """A line per task: its training loss, or without a `key` its metric on rows held out."""
    records = [record for record in report.records if record.phase == "phase1"]
    tasks = dict.fromkeys(task for record in records for task in (*record.losses, *record.validation))
    lines = []
    for place, task in enumerate(task for task in tasks if task != "total"):
        colour = TASK_COLOURS[place % len(TASK_COLOURS)]
        if key is not None:
            lines.append(loss_line(records, task, name=task, colour=colour))
            continue
        metric = report.evaluation.metrics.get(task) if report.evaluation else None
        scored = (name for record in records for name in record.validation.get(task, {}) if name != "loss")
        lines.append(validation_line(records, task, metric or next(scored, "loss"), name=task, colour=colour))
    return lines


def _router_lines(report: RunReport) -> list[Line]:
    records = [record for record in report.records if record.phase == "phase2"]
    terms = dict.fromkeys(term for record in records for term in record.losses)
    return [
        loss_line(records, term, name=term, colour=TASK_COLOURS[place % len(TASK_COLOURS)])
        for place, term in enumerate(terms)
    ]


def _routing_lines(report: RunReport) -> list[Line]:
    """Accuracy alone: losses and temperatures are of another size."""
    lines = []
    for place, phase in enumerate(("phase2", "phase3")):
        records = [record for record in report.records if record.phase == phase]
        lines.append(routing_line(records, "accuracy", name=phase, colour=TASK_COLOURS[place]))
    return lines


def _draw_curves(axes: Any, lines: Sequence[Line], title: str, *, is_logarithmic: bool = False) -> None:
    axes.set_title(title, fontsize=9, loc="left", color=INK)
    known = [line for line in lines if line.points]
    if not known:
        _nothing(axes)
        return
    drawn: list[str] = []
    for line in known:
        steps, values = zip(*thinned(line.points), strict=True)
        axes.plot(
            steps,
            values,
            color=line.colour,
            linestyle=DASHES[drawn.count(line.colour) % len(DASHES)],
            label=_plain(line.name),
            linewidth=1.4,
            marker="o" if len(steps) == 1 else None,
        )
        drawn.append(line.colour)
    if is_logarithmic:
        axes.set_yscale("symlog", linthresh=LEAST_LOSS)  # terms that are 0, and one that may be below it
    axes.set_xlabel("step", fontsize=8, color=SOFT)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.legend(frameon=False, fontsize=7)


def _plain(text: str, *, longest: int = LONGEST_NAME) -> str:
    """Text as it stands: matplotlib would read a dollar sign as mathematics, a leading _ as no label."""
    return printable(text)[:longest].replace("$", r"\$").lstrip("_")


def _nothing(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, UNKNOWN, transform=axes.transAxes, color=SOFT, horizontalalignment="center")
