"""The curves of a run as one PNG or SVG picture, for a paper, a ticket or a chat."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flatout.errors import BadInput, import_extra
from flatout.measure import PHASES
from flatout.monitor.past.recorded import Recorded
from flatout.monitor.past.summary import job_gpu
from flatout.monitor.sample import Sample
from flatout.page.printable import printable

SUFFIXES = (".png", ".svg")
GIB = 2**30
LONGEST_TITLE = 80
PHASE_COLOURS = {
    "wait": "#d29a2a",
    "transfer": "#9a5a9f",
    "forward": "#3c69ab",
    "backward": "#2f8f83",
    "optimizer": "#86a53b",
    "rest": "#a5a297",
}
LINES = ("#3c69ab", "#d29a2a", "#2f8f83")
BOUND_COLOURS = {
    "healthy": "#4d9a57",
    "compute": "#4d9a57",
    "data": "#d29a2a",
    "transfer": "#9a5a9f",
    "host": "#3c69ab",
    "idle-gpu": "#2f8f83",
    "memory": "#c2452d",
    "stalled": "#c2452d",
    "throttled": "#c2452d",
}
NO_VERDICT = "#dcd8cd"

Value = Callable[[Sample], float | None]
Panel = Callable[[Any, Recorded], bool]  # draws; False where there is nothing to draw


def plot_run(recorded: Recorded, path: Path) -> Path:
    """Draw a run into a file, by the suffix of `path`."""
    if path.suffix.lower() not in SUFFIXES:
        raise BadInput(f"{path} is neither a .png nor a .svg file", hint="give one of these endings")
    figures = import_extra("matplotlib.figure", extra="plots")
    canvas = import_extra("matplotlib.backends.backend_agg", extra="plots")
    panels = [panel for panel in PANELS if panel(_Nothing(), recorded)]
    num_rows = (len(panels) + 1) // 2
    figure = figures.Figure(figsize=(12, 0.9 + 2.3 * num_rows), layout="constrained")
    canvas.FigureCanvasAgg(figure)
    # What a job calls itself is text: matplotlib would read a dollar sign as mathematics.
    title = printable(f"{recorded.run.name}  {recorded.folder.name}")[:LONGEST_TITLE].replace("$", r"\$")
    figure.suptitle(title, fontsize=11)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(max(num_rows, 1), 2, number + 1)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        panel(axes, recorded)
        axes.set_xlim(0, max(recorded.duration_s / _unit(recorded)[0], 1e-9))
        axes.set_xlabel(_unit(recorded)[1], fontsize=8)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        figure.savefig(temporary, dpi=130, format=path.suffix.lower()[1:])
        temporary.replace(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror}") from None
    return path


class _Nothing:
    """Takes any drawing: a panel that is only asked whether it has something to draw."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


def _unit(recorded: Recorded) -> tuple[float, str]:
    long = recorded.duration_s > 3 * 3600
    return (3600.0, "hours") if long else (60.0, "minutes") if recorded.duration_s > 180 else (1.0, "seconds")


def _times(recorded: Recorded) -> list[float]:
    return [(point.time_s - recorded.start_s) / _unit(recorded)[0] for point in recorded.points]


def _lines(*lines: tuple[str, Value], title: str, top: float | None = None, scale: float = 1.0) -> Panel:
    def draw(axes: Any, recorded: Recorded) -> bool:
        drawn = False
        for (name, value), colour in zip(lines, LINES, strict=False):
            values = [value(point) for point in recorded.points]
            if any(each is not None for each in values):
                heights = [float("nan") if each is None else each * scale for each in values]
                axes.plot(_times(recorded), heights, color=colour, linewidth=1.3, label=name)
                drawn = True
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_ylim(0, top) if top is not None else axes.set_ylim(bottom=0)
        axes.grid(axis="y", linewidth=0.4)
        if len(lines) > 1 and drawn:
            axes.legend(fontsize=7, frameon=False)
        return drawn

    return draw


def _loss(axes: Any, recorded: Recorded) -> bool:
    losses = [None if point.job is None else point.job.loss for point in recorded.points]
    if not any(loss is not None for loss in losses):
        return False
    heights = [float("nan") if loss is None else loss for loss in losses]
    axes.plot(_times(recorded), heights, color=LINES[0], linewidth=1.3)
    axes.set_title("loss", fontsize=9, loc="left")
    axes.grid(axis="y", linewidth=0.4)
    return True


def _phases(axes: Any, recorded: Recorded) -> bool:
    has_device = any(point.job is not None and point.job.device_phases for point in recorded.points)
    shares: list[dict[str, float]] = []
    for point in recorded.points:
        job = point.job
        shares.append((job.device_phases if has_device else job.phases) or {} if job is not None else {})
    if not any(shares):
        return False
    seen = [phase for phase in PHASES if any(each.get(phase) for each in shares)]
    heights = [[100 * each.get(phase, 0.0) for each in shares] for phase in seen]
    axes.stackplot(_times(recorded), heights, colors=[PHASE_COLOURS[phase] for phase in seen], labels=seen)
    axes.set_ylim(0, 100)
    axes.set_title(f"where a step goes, {'GPU' if has_device else 'host'} (%)", fontsize=9, loc="left")
    axes.legend(fontsize=7, framealpha=0.85, ncols=3, loc="lower right")
    return True


def _bounds(axes: Any, recorded: Recorded) -> bool:
    known = [stretch for stretch in recorded.stretches if stretch.verdict is not None]
    if not known:
        return False
    scale = _unit(recorded)[0]
    bounds = list(dict.fromkeys(stretch.verdict.bound for stretch in known if stretch.verdict))
    for height, bound in enumerate(bounds):
        spans = [
            ((stretch.start_s - recorded.start_s) / scale, (stretch.end_s - stretch.start_s) / scale)
            for stretch in known
            if stretch.verdict is not None and stretch.verdict.bound == bound
        ]
        colour = BOUND_COLOURS.get(bound, NO_VERDICT)
        axes.broken_barh(spans, (height - 0.35, 0.7), color=colour)
    axes.set_yticks(range(len(bounds)), bounds)
    axes.set_ylim(-0.7, len(bounds) - 0.3)
    axes.set_title("what bounded it", fontsize=9, loc="left")
    return True


def _job(name: str) -> Value:
    return lambda point: None if point.job is None else getattr(point.job, name)


def _gpu(name: str) -> Value:
    return lambda point: None if (gpu := job_gpu(point)) is None else getattr(gpu, name)


PANELS: Sequence[Panel] = (
    _bounds,
    _phases,
    _lines(("it/s", _job("steps_per_s")), title="steps per second"),
    _loss,
    _lines(
        ("a kernel runs", _gpu("utilisation_share")),
        ("processors active", _gpu("sm_active_share")),
        title="GPU (%)",
        top=105,
        scale=100,
    ),
    _lines(("power", _gpu("power_w")), title="power (W)"),
    _lines(
        ("device", _gpu("memory_used_bytes")),
        ("reserved by torch", _job("reserved_bytes")),
        ("held by tensors", _job("allocated_bytes")),
        title="GPU memory (GiB)",
        scale=1 / GIB,
    ),
    _lines(("host", lambda point: point.host.memory_used_bytes), title="host memory (GiB)", scale=1 / GIB),
    _lines(("per step", _job("energy_per_step_j")), title="energy per step (J)"),
    _lines(("per sample", _job("energy_per_sample_j")), title="energy per sample (J)"),
    _lines(("CPU", lambda point: point.host.cpu_share), title="CPU (%)", top=105, scale=100),
)
