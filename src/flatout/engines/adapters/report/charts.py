"""The charts of an adapters run, for its page and its figure file: scores, matrices, confidence, curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flatout.engines.adapters.evaluation.results import ROUTINGS, Evaluation, RoutingQuality
from flatout.engines.adapters.report.run_report import RunReport
from flatout.engines.adapters.training.records import StepRecord
from flatout.ground.units import UNKNOWN, show, show_share
from flatout.page.charts import (
    Axes,
    Cell,
    Chart,
    ChartRow,
    Column,
    Curve,
    Drawing,
    Key,
    Mark,
    Matrix,
    RowChart,
    columns,
    curves,
    scatter,
)
from flatout.page.figures import write_figure
from flatout.page.scales import Scale, log_scale, span_scale, step_scale

# From the back to the front, with their colours: what is drawn last must not be hidden.
KINDS = {
    "random": "rest",
    "uniform": "backward",
    "single": "transfer",
    "heads-only": "wait",
    "oracle": "ink",
    "routed": "accent",
}
CONFIDENCE = Scale(low=0.0, high=1.0, ticks=tuple((n / 5, f"{n / 5:g}") for n in range(6)))
SHARES = Scale(low=0.0, high=1.0, ticks=((0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")))
POINTS = Scale(low=0.0, high=100.0, ticks=tuple((n, str(n)) for n in (0, 25, 50, 75, 100)))
LINE_COLOURS = ("forward", "backward", "wait", "transfer", "accent", "optimizer")
LEAST_LOSS = 1e-4  # below it a loss is drawn as if it were on its way to 0 by equal steps


def show_points(value: float | None) -> str:
    return show(value, "{:.1f}")


def show_exact_share(share: float | None) -> str:
    """Show a share with one decimal: differences between 97 % and 98 % matter."""
    return UNKNOWN if share is None else "100 %" if share == 1 else f"{100 * share:.1f} %"


# Scores


def score_dots(evaluation: Evaluation) -> RowChart:
    """Draw a row from 0 to 100 points per task, with a dot for each routing."""
    found = {task: _values(evaluation, task) for task in evaluation.tasks}
    seen = [kind for kind in reversed(KINDS) if any(kind in values for values in found.values())]
    chart = RowChart(across=POINTS, height=26)
    rows = []
    for task, values in found.items():
        marks = [chart.track(), *(chart.rule(tick, "line") for tick, _ in POINTS.ticks)]
        marks += [
            chart.dot(
                values[kind],
                colour,
                size=7 if kind == "oracle" else 4.5,
                hollow=kind == "oracle",
                title=f"{task}, {kind}: {show_points(values[kind])}",
            )
            for kind, colour in KINDS.items()
            if kind in values
        ]
        spoken = ", ".join(f"{kind} {show_points(values[kind])}" for kind in seen if kind in values)
        label, metric = f"{task}: {spoken}", evaluation.metrics[task]
        rows.append(ChartRow(name=task, marks=tuple(marks), label=label, figure=metric))
    keys = [Key(name=kind, colour=KINDS[kind], kind="ring" if kind == "oracle" else "dot") for kind in seen]
    return RowChart(rows=tuple(rows), across=POINTS, height=26, legend=tuple(keys))


def _values(evaluation: Evaluation, task: str) -> dict[str, float]:
    found: dict[str, float | None] = {
        routing: evaluation.score(task, routing) for routing in ROUTINGS if routing in KINDS
    }
    found["heads-only"] = evaluation.heads_only_score(task)
    return {kind: value for kind, value in found.items() if value is not None}


# Matrices


def confusion(quality: RoutingQuality, tasks: Sequence[str]) -> Matrix:
    """Show which adapter the rows of each task went to."""

    def cell(task: str, adapter: str, count: int, total: int) -> Cell:
        return Cell(
            text=show_exact_share(count / total) if count else "·",
            title=f"{count} of {total} rows of {task} went to {adapter}",
            colour="own" if adapter == task else "bad",
            # A few rows at the wrong adapter are what the reader looks for: they get more than their share.
            strength=math.sqrt(count / total) if total else 0.0,
        )

    return Matrix(
        label="rows of each task by the adapter chosen",
        rows=tuple(tasks),
        columns=tuple(tasks),
        cells=tuple(
            tuple(
                cell(task, adapter, count, sum(counts)) for adapter, count in zip(tasks, counts, strict=True)
            )
            for task, counts in zip(tasks, quality.confusion, strict=True)
        ),
        corner="rows of ↓ sent to →",
    )


def transfer(evaluation: Evaluation) -> Matrix | None:
    """Show each task's score with all rows under one adapter; None unless two adapters were tried."""
    adapters = [name for name in evaluation.tasks if name in evaluation.adapters]
    if len(adapters) < 2:
        return None

    def cell(task: str, adapter: str) -> Cell:
        value = evaluation.score(task, "single", adapter=adapter)
        own = evaluation.score(task, "oracle")
        lost = (own - value) / own if value is not None and own is not None and own > 0 else 0.0
        return Cell(
            text=show_points(value),
            title=f"{task} under the adapter of {adapter}: {show_points(value)}",
            colour="own" if adapter == task else "bad",
            strength=1.0 if adapter == task else lost,
        )

    return Matrix(
        label="score of each task under each adapter",
        rows=evaluation.tasks,
        columns=tuple(adapters),
        cells=tuple(tuple(cell(task, adapter) for adapter in adapters) for task in evaluation.tasks),
        corner="score of ↓ under →",
    )


# Confidence and load


def confidence_bars(quality: RoutingQuality) -> Drawing:
    """Draw rows by confidence: those routed correctly at the bottom, the others on top."""
    most = max((each.num_rows for each in quality.bins), default=0) or 1
    bars = [
        Column(
            left=each.low + 0.004,
            right=each.high - 0.004,
            parts=(("own", each.num_right), ("bad", each.num_rows - each.num_right)),
            title=f"confidence {each.low:.1f} to {each.high:.1f}: {each.num_rows:,} rows, "
            f"{each.num_right:,} routed correctly",
        )
        for each in quality.bins
    ]
    label = "; ".join(f"{each.low:.1f} to {each.high:.1f}: {each.num_rows} rows" for each in quality.bins)
    up = Scale(low=0, high=most, ticks=((0, "0"), (most / 2, f"{most // 2:,}"), (most, f"{most:,}")))
    axes = Axes(across=CONFIDENCE, up=up, name_across="confidence")
    threshold = quality.threshold
    return columns(
        bars,
        axes,
        label=f"rows by confidence: {label}",
        legend=(Key(name="routed correctly", colour="own"), Key(name="wrongly", colour="bad")),
        rules=[axes.upright(threshold, title=f"threshold {threshold:g}")] if threshold > 0 else (),
    )


def reliability(quality: RoutingQuality) -> Drawing:
    """Draw the share routed correctly over the confidence: on the dashed line they are equal."""
    most = max((each.num_rows for each in quality.bins), default=0) or 1
    dots = [
        Mark(
            shape="dot",
            at=((each.mean_confidence, each.right_share),),
            colour="accent",
            size=round(3 + 5 * (each.num_rows / most) ** 0.5, 2),
            title=f"{each.num_rows:,} rows at {each.mean_confidence:.2f}: "
            f"{show_share(each.right_share)} right",
        )
        for each in quality.bins
        if each.mean_confidence is not None and each.right_share is not None
    ]
    diagonal = Mark(shape="line", at=((0.0, 0.0), (1.0, 1.0)), colour="soft", dashed=True)
    return scatter(
        [diagonal, *dots],
        Axes(across=CONFIDENCE, up=SHARES, name_across="confidence"),
        label="share that is right by confidence: " + "; ".join(dot.title for dot in dots),
    )


def load_bars(quality: RoutingQuality) -> RowChart:
    """Draw how often each adapter was needed and how often it was used, as shares of all rows."""
    most = max([*quality.needed_share.values(), *quality.used_share.values(), 1e-9])
    chart = RowChart(across=Scale(low=0.0, high=most), height=24)
    rows = []
    for name, needed in quality.needed_share.items():
        used = quality.used_share.get(name, 0.0)
        words = f"needed {show_share(needed)}, used {show_share(used)}"
        bars = (
            chart.bar(0, needed, "rest", lane=(0.1, 0.45), title=words),
            chart.bar(0, used, "own", lane=(0.55, 0.9), title=words),
        )
        figure = f"{show_exact_share(needed)} → {show_exact_share(used)}"
        rows.append(ChartRow(name=name, marks=bars, label=f"{name}: {words}", figure=figure))
    keys = (Key(name="rows that need it", colour="rest"), Key(name="weight it got", colour="own"))
    return RowChart(rows=tuple(rows), across=chart.across, height=24, legend=keys)


# Curves over the steps of a phase


def loss_line(records: Sequence[StepRecord], key: str, *, name: str = "") -> Curve:
    """Make the curve of a loss, by its name in the log."""
    points = [(record.step, record.losses.get(key)) for record in records]
    return Curve(name=name or key, colour="rest", points=points)


def validation_line(
    records: Sequence[StepRecord], task: str, key: str, *, name: str, colour: str = "forward"
) -> Curve:
    """Make the curve of a task's score or loss on held-out rows."""
    points = [(record.step, record.validation.get(task, {}).get(key)) for record in records]
    return Curve(name=name, colour=colour, points=points)


def routing_line(
    records: Sequence[StepRecord], key: str, *, name: str = "", colour: str = "forward"
) -> Curve:
    """Make the curve of a figure of the router."""
    points = [(record.step, record.routing.get(key)) for record in records]
    return Curve(name=name or key, colour=colour, points=points)


def draw_learning(
    lines: Sequence[Curve], *, is_logarithmic: bool = False, height: float = 96
) -> Drawing | None:
    """Draw lines over the steps; None where no line has a point.  Evaluations are rare: gaps are joined."""
    known = [point for line in lines for point in line.known]
    if not known:
        return None
    steps, values = zip(*known, strict=True)
    low, high = min(values), max(values)
    axes = Axes(
        across=step_scale(int(min(0, *steps)), int(max(1, *steps))),
        up=log_scale(low, high, bend=LEAST_LOSS) if is_logarithmic else span_scale(low, high),
        height=height,
    )
    return curves(lines, axes, shows_last=True)


# The figure file


def plot_report(report: RunReport, path: Path) -> Path:
    """Draw scores, confusion and curves of the phases into a PNG or SVG file."""
    found = report.evaluation
    quality = found.routing if found else None
    curves_of = {
        "loss of the tasks, phase 1": _task_lines(report, "loss"),
        "scores, rows held out, phase 1": _task_lines(report, None),
        "losses of the router, phase 2": _router_lines(report),
        "routing accuracy, rows held out": _accuracy_lines(report),
    }
    panels: dict[str, Chart | None] = {
        "score by routing": score_dots(found) if found else None,
        "rows of a task by the adapter chosen": confusion(quality, found.tasks)
        if found and quality
        else None,
    }
    for title, lines in curves_of.items():
        panels[title] = draw_learning(_coloured(lines), is_logarithmic="router" in title, height=130)
    return write_figure(path, panels, title=f"{report.name}  ·  {report.model}")


def _task_lines(report: RunReport, key: str | None) -> Iterator[Curve]:
    """Yield a line per task: its training loss, or without a `key` its metric on held-out rows."""
    records = report.of_phase("phase1")
    tasks = dict.fromkeys(task for record in records for task in (*record.losses, *record.validation))
    for task in tasks:
        if task != "total" and key is not None:
            yield loss_line(records, task)
        elif task != "total":
            yield validation_line(records, task, report.metric(task, records) or "loss", name=task)


def _router_lines(report: RunReport) -> Iterator[Curve]:
    records = report.of_phase("phase2")
    for term in dict.fromkeys(term for record in records for term in record.losses):
        yield loss_line(records, term)


def _accuracy_lines(report: RunReport) -> Iterator[Curve]:
    """Yield accuracy alone: losses and temperatures have another scale."""
    for phase in ("phase2", "phase3"):
        yield routing_line(report.of_phase(phase), "accuracy", name=phase)


def _coloured(lines: Iterable[Curve]) -> list[Curve]:
    """Give each line a colour; where lines outnumber colours, they are dashed."""
    return [
        replace(line, colour=LINE_COLOURS[place % len(LINE_COLOURS)], dashed=place >= len(LINE_COLOURS))
        for place, line in enumerate(line for line in lines if line.known)
    ]
