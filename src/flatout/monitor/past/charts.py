"""The charts of a run over its time: one list for the page and for the figure file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from flatout.ground.units import show_byte_rate, show_bytes, show_joules, show_share, show_time
from flatout.measure import PHASES
from flatout.monitor.past.outline import RunOutline
from flatout.monitor.past.summary import gpu_figure, job_figure, job_gpu
from flatout.monitor.sample import Sample, merge
from flatout.page.charts import Axes, Chart, ChartRow, Curve, Drawing, Key, RowChart, curves, stack
from flatout.page.figures import write_figure
from flatout.page.scales import Scale, Show, binary_unit, span_scale, time_scale, zero_scale

COLOURS = ("forward", "wait", "backward")
BOUND_COLOURS = {
    "healthy": "good",
    "compute": "good",
    "data": "wait",
    "transfer": "transfer",
    "host": "forward",
    "idle-gpu": "backward",
    "diverged": "bad",
    "memory": "bad",
    "stalled": "bad",
    "throttled": "bad",
}
NEAR = 1.6  # a limit this many times the highest value is drawn, one further above is named

Value = Callable[[Sample], float | None]


def _plain(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else str(value)


def bound_colour(bound: str | None) -> str:
    """Return the colour of a verdict, and of none."""
    return BOUND_COLOURS.get(bound or "", "line")


def _host(name: str) -> Value:
    return lambda point: getattr(point.host, name)


@dataclass(frozen=True, slots=True)
class TimeChart:
    """Lines over the time of a run: where they stand on the page, what they show, and how."""

    section: str
    title: str
    lines: Mapping[str, Value]
    _: KW_ONLY
    show: Show = _plain
    top: float | None = None
    from_zero: bool = True
    is_binary: bool = False  # marked at round numbers of KiB, MiB or GiB
    limit: tuple[str, str] | None = None  # its name, and the field of the GPU that holds it


_BUSY = {
    "a kernel runs": gpu_figure("utilisation_share"),
    "processors active": gpu_figure("sm_active_share"),
    "tensor cores active": gpu_figure("tensor_active_share"),
}
_GPU_MEMORY = {
    "in use on the device": gpu_figure("memory_used_bytes"),
    "reserved by torch": job_figure("reserved_bytes"),
    "held by tensors": job_figure("allocated_bytes"),
}
_HOST_MEMORY = {"in use on the host": _host("memory_used_bytes")}
_DISKS = {"read": _host("disk_read_bytes_per_s"), "written": _host("disk_write_bytes_per_s")}
_POWER_LIMIT = ("limit", "power_limit_w")
_CAPACITY = ("capacity", "memory_total_bytes")
CHARTS = (
    TimeChart("Speed and loss", "Steps per second", {"it/s": job_figure("steps_per_s")}),
    TimeChart("Speed and loss", "Loss", {"loss": job_figure("loss")}, from_zero=False),
    TimeChart("The GPU", "How busy", _BUSY, show=show_share, top=1.0),
    TimeChart(
        "The GPU", "Power", {"power": gpu_figure("power_w")}, show="{:.0f} W".format, limit=_POWER_LIMIT
    ),
    TimeChart("Memory", "GPU", _GPU_MEMORY, show=show_bytes, is_binary=True, limit=_CAPACITY),
    TimeChart("Memory", "Host", _HOST_MEMORY, show=show_bytes, is_binary=True),
    TimeChart("Energy", "Per step", {"per step": job_figure("energy_per_step_j")}, show=show_joules),
    TimeChart("Energy", "Per sample", {"per sample": job_figure("energy_per_sample_j")}, show=show_joules),
    TimeChart("The host", "Processors", {"CPU": _host("cpu_share")}, show=show_share, top=1.0),
    TimeChart("The host", "Disks", _DISKS, show=show_byte_rate, is_binary=True),
)


def time_chart(recorded: RunOutline, wanted: TimeChart) -> Drawing | None:
    """Draw one of CHARTS for a run; None if no line has a value.  An unknown value is a gap."""
    lines = [
        Curve(
            name=name,
            colour=colour,
            points=[(point.time_s - recorded.start_s, value(point)) for point in recorded.points],
        )
        for (name, value), colour in zip(wanted.lines.items(), COLOURS, strict=False)
    ]
    values = [value for line in lines for _, value in line.known]
    if not values:
        return None
    limit = _limit(recorded, wanted)
    high = wanted.top or max(values)
    if limit is not None and limit[1] <= NEAR * high:
        high = max(high, limit[1])
    if wanted.from_zero:
        up = zero_scale(high, wanted.show, unit=binary_unit(high) if wanted.is_binary else 1.0)
    else:
        up = span_scale(min(values), high, wanted.show)
    axes = Axes(across=time_scale(recorded.duration_s), up=up)
    return curves(lines, axes, show=wanted.show, show_across=show_time, limit=limit, has_gaps=True)


def _limit(recorded: RunOutline, wanted: TimeChart) -> tuple[str, float] | None:
    gpu = job_gpu(merge(recorded.points))
    if wanted.limit is None or gpu is None:
        return None
    name, attribute = wanted.limit
    value = getattr(gpu, attribute)
    return (name, float(value)) if value else None


def phases_over_time(recorded: RunOutline) -> tuple[str, Drawing] | None:
    """Draw the shares of the step by the clock of the GPU, else the host; None without two points."""
    for clock, attribute in (("GPU", "device_phases"), ("host", "phases")):
        found = [
            (point.time_s - recorded.start_s, shares)
            for point in recorded.points
            if point.job is not None and (shares := getattr(point.job, attribute))
        ]
        if len(found) > 1:
            layers = [
                Curve(name=phase, colour=phase, points=[(x, shares.get(phase, 0.0)) for x, shares in found])
                for phase in PHASES
                if any(phase in shares for _, shares in found)
            ]
            halves = tuple((level, show_share(level)) for level in (0.0, 0.5, 1.0))
            axes = Axes(across=time_scale(recorded.duration_s), up=Scale(low=0.0, high=1.0, ticks=halves))
            label = f"shares of the step by the clock of the {clock}, over time"
            return clock, stack(layers, axes, label=label)
        if found:
            return None
    return None


def bounds_over_time(recorded: RunOutline) -> RowChart:
    """Draw what bounded the run over time, a coloured cell per stretch."""
    chart = RowChart(across=time_scale(recorded.duration_s), height=24)
    cells = []
    for stretch in recorded.stretches:
        start_s, verdict = stretch.start_s - recorded.start_s, stretch.verdict
        words = "too little to say" if verdict is None else f"{verdict.bound}: {verdict.sentence}"
        cells.append(
            chart.bar(
                start_s,
                max(stretch.end_s - recorded.start_s, start_s + 0.001 * recorded.duration_s),
                bound_colour(verdict.bound if verdict else None),
                title=f"{show_time(start_s)}: {words}",
            )
        )
    seen = dict.fromkeys(stretch.verdict.bound for stretch in recorded.stretches if stretch.verdict)
    row = ChartRow(name="", marks=tuple(cells), label="what limited the run over time: " + ", ".join(seen))
    keys = tuple(Key(name=bound, colour=bound_colour(bound)) for bound in seen)
    return RowChart(rows=(row,), across=chart.across, height=24, legend=keys, kind="rows bare")


def plot_run(recorded: RunOutline, path: Path) -> Path:
    """Draw every chart of a run into a PNG or SVG file."""
    return write_figure(path, dict(_panels(recorded)), title=f"{recorded.run.name}  {recorded.folder.name}")


def _panels(recorded: RunOutline) -> Iterator[tuple[str, Chart]]:
    if any(stretch.verdict for stretch in recorded.stretches):
        yield "What bounded it", bounds_over_time(recorded)
    if found := phases_over_time(recorded):
        clock, drawing = found
        yield f"Where a step goes, by the clock of the {clock}", drawing
    for wanted in CHARTS:
        if (chart := time_chart(recorded, wanted)) is not None:
            yield f"{wanted.section}: {wanted.title}", chart
