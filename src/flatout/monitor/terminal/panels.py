"""The parts of the terminal view: tables and curves, each for the columns it is given.

A narrow terminal loses columns, never figures of those that stay.  Names come from jobs and drivers: they
are made printable and set as text, which rich never reads as markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from flatout.ground.units import UNKNOWN, show, show_byte_rate, show_bytes, show_seconds, show_share
from flatout.measure import PHASES
from flatout.monitor.sample import GpuSample, HostSample, JobSample, ProcessSample, Sample
from flatout.monitor.terminal.view import ON_GPU, View, sorted_processes
from flatout.page.printable import printable

GIB = 2**30
CURVE_S = 120.0
LONGEST_CURVE = 120
LONGEST_NAME = 60
MARKS = "▁▂▃▄▅▆▇█"
PLAIN_MARKS = "_.-=+*#@"  # for terminals without these characters
DIM, HEAD = "dim", "bold"
PHASE_COLOURS = {  # bright enough for a dark terminal, dark enough for a light one
    "wait": "#d9a53a",
    "transfer": "#b27bb6",
    "forward": "#6792d1",
    "backward": "#45aa9d",
    "optimizer": "#96b44c",
    "rest": "#9c998e",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """What is drawn on: columns, and what the terminal can show."""

    width: int
    is_low: bool = False  # too few lines for everything
    has_blocks: bool = True
    has_colour: bool = True

    @property
    def marks(self) -> str:
        return MARKS if self.has_blocks else PLAIN_MARKS


def text(value: object, *, style: str = "") -> Text:
    """Make one line of text that is harmless to the terminal."""
    shown = printable(str(value))
    return Text(shown[:LONGEST_NAME], style=style, no_wrap=True, overflow="ellipsis")


def _grid(*columns: tuple[str, str]) -> Table:
    """Make a table of (head, justification) columns; the last is cut first when space is short."""
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style=DIM)
    for number, (head, justify) in enumerate(columns, start=1):
        # rich shortens columns that may wrap before others; the text of the last one never does.
        keeps = number < len(columns)
        table.add_column(head, justify=justify, no_wrap=keeps, overflow="ellipsis")  # type: ignore[arg-type]
    return table


# GPUs


def _memory(used: float | None, total: float | None) -> str:
    if used is None or not total:
        return UNKNOWN
    return f"{used / GIB:.1f}/{total / GIB:.1f} GiB {show_share(used / total):>5}"


def _power(gpu: GpuSample) -> str:
    limit = "" if gpu.power_limit_w is None else f"/{gpu.power_limit_w:.0f}"
    return show(gpu.power_w, f"{{:.0f}}{limit} W")


GpuColumn = tuple[str, int, Callable[[GpuSample], str]]
GPU_COLUMNS: tuple[GpuColumn, ...] = (  # (head, columns from which there is room, figure)
    ("util", 0, lambda gpu: show_share(gpu.utilisation_share)),
    ("SM", 0, lambda gpu: show_share(gpu.sm_active_share)),
    ("memory", 0, lambda gpu: _memory(gpu.memory_used_bytes, gpu.memory_total_bytes)),
    ("power", 52, _power),
    ("temp", 66, lambda gpu: show(gpu.temperature_c, "{:.0f} °C")),
    ("clock", 96, lambda gpu: show(gpu.sm_clock_hz and gpu.sm_clock_hz / 1e6, "{:.0f} MHz")),
    ("tensor", 104, lambda gpu: show_share(gpu.tensor_active_share)),
    ("from host", 118, lambda gpu: show_byte_rate(gpu.pcie_received_bytes_per_s)),
    ("to host", 118, lambda gpu: show_byte_rate(gpu.pcie_sent_bytes_per_s)),
)
NAME_FROM = 84


def gpu_table(sample: Sample, view: View, paper: Paper) -> RenderableType:
    """Show a row per GPU, or why there is none."""
    if not sample.gpus:
        return Text(printable(f"no GPU: {sample.missing.get('gpus', 'NVML shows none')}"), style="yellow")
    columns = [column for column in GPU_COLUMNS if paper.width >= column[1]]
    table = _grid(("GPU", "left"), *((head, "right") for head, _, _ in columns), ("", "left"))
    for position, gpu in enumerate(sample.gpus):
        is_chosen = position == _chosen(view, sample) and len(sample.gpus) > 1
        label = ("> " if is_chosen else "  ") if len(sample.gpus) > 1 else ""
        cells = ["", "", "lost"] if gpu.lost else [figure(gpu) for _, _, figure in columns]
        cells += [""] * (len(columns) - len(cells))
        table.add_row(
            label + gpu.label, *cells, _aside(gpu, paper), style="red" if gpu.lost else HEAD * is_chosen
        )
    return table


def _aside(gpu: GpuSample, paper: Paper) -> Text:
    held = [reason for reason in gpu.throttle_reasons or () if reason != "idle"]
    if held:
        return text(", ".join(held), style="yellow")
    return text(gpu.name or "", style=DIM) if paper.width >= NAME_FROM else Text()


def _chosen(view: View, sample: Sample) -> int:
    return min(view.gpu, max(len(sample.gpus) - 1, 0))


# Curves

# (label, last value as shown, figure, value of a full mark)
PanelCurve = tuple[str, str, Callable[[Sample], float | None], float | None]


def curves(samples: Sequence[Sample], view: View, paper: Paper) -> RenderableType:
    """Show the last two minutes of the chosen GPU, the host and the job."""
    latest = samples[-1]
    rows: list[PanelCurve] = []
    if latest.gpus:
        rows += _gpu_curves(latest.gpus[_chosen(view, latest)])
    if not paper.is_low or not latest.gpus:
        rows.append(("CPU", show_share(latest.host.cpu_share), lambda sample: sample.host.cpu_share, 1.0))
    if latest.job is not None:
        rate = next((s.job.steps_per_s for s in reversed(samples) if s.job and s.job.steps_per_s), None)
        rows.append(("it/s", show(rate, "{:.4g}"), lambda s: s.job.steps_per_s if s.job else None, None))
    if latest.job is not None and latest.job.loss is not None:
        rows.append(("loss", show(latest.job.loss, "{:.4g}"), lambda s: s.job.loss if s.job else None, None))
    table = _grid(("", "left"), ("", "left"), ("", "right"))
    table.show_header = False
    room = min(max(paper.width - 26, 8), LONGEST_CURVE)
    for label, shown, figure, top in rows:
        points = [(sample.time_s, figure(sample)) for sample in samples]
        drawn = sparkline(points, width=room, span_s=CURVE_S, top=top, marks=paper.marks)
        table.add_row(Text(label, style=DIM), Text(drawn, style="cyan"), shown)
    if latest.job is not None:
        where, shares = (
            ("GPU", latest.job.device_phases) if latest.job.device_phases else ("", latest.job.phases)
        )
        if shares:
            table.add_row(Text(f"step {where}", style=DIM), phase_bar(shares, room, paper), "")
    return table


def _gpu_curves(gpu: GpuSample) -> Iterator[PanelCurve]:
    key, name = gpu.key, f"GPU {gpu.label}"

    def of(figure: Callable[[GpuSample], float | None]) -> Callable[[Sample], float | None]:
        return lambda sample: next((figure(each) for each in sample.gpus if each.key == key), None)

    if gpu.sm_active_share is not None:
        yield f"{name} SM", show_share(gpu.sm_active_share), of(lambda each: each.sm_active_share), 1.0
    else:
        yield f"{name} util", show_share(gpu.utilisation_share), of(lambda each: each.utilisation_share), 1.0
    total = gpu.memory_total_bytes
    shown = show_share(gpu.memory_used_bytes / total if gpu.memory_used_bytes is not None and total else None)
    yield f"{name} memory", shown, of(lambda each: each.memory_used_bytes), float(total) if total else None
    yield f"{name} power", show(gpu.power_w, "{:.0f} W"), of(lambda each: each.power_w), gpu.power_limit_w


def sparkline(
    points: Iterable[tuple[float, float | None]],
    *,
    width: int,
    span_s: float,
    top: float | None = None,
    marks: str = MARKS,
) -> str:
    """Draw the last `span_s` seconds of (time, value) in `width` characters; `top` is a full mark.

    Without `top` it is the highest of the curve.  Columns are slots of absolute time: a curve moves as one
    and never shimmers.  Gaps in the samples and unknown values are blanks; zero is the lowest mark.
    """
    known = [(time_s, value) for time_s, value in points]
    if not known or width < 1:
        return " " * max(width, 0)
    slot_s = span_s / width
    last = math.floor(known[-1][0] / slot_s)
    slots: list[list[float]] = [[] for _ in range(width)]
    for time_s, value in known:
        column = width - 1 - (last - math.floor(time_s / slot_s))
        if value is not None and math.isfinite(value) and 0 <= column < width:
            slots[column].append(value)
    means = [sum(slot) / len(slot) if slot else None for slot in slots]
    height = top if top is not None else max((mean for mean in means if mean is not None), default=0.0)
    return "".join(" " if mean is None else _mark(mean, height, marks) for mean in means)


def _mark(value: float, height: float, marks: str) -> str:
    share = min(max(value / height, 0.0), 1.0) if height > 0 else 0.0
    return marks[min(int(share * len(marks)), len(marks) - 1)]


# The job


def job_lines(job: JobSample) -> list[RenderableType]:
    """Show the job's steps, its allocator's memory, and where the time of a step goes."""
    parts = []
    if job.steps is not None:
        parts.append(f"step {job.steps}")
    if job.step_s is not None:
        parts.append(f"{show_seconds(job.step_s)} each")
    if job.samples_per_s is not None:
        parts.append(f"{job.samples_per_s:.4g} samples/s")
    if job.learning_rate is not None:
        parts.append(f"lr {job.learning_rate:.2g}")
    if job.energy_per_step_j is not None:
        parts.append(f"{job.energy_per_step_j:.3g} J per step")
    if job.allocated_bytes is not None:
        held = f"torch holds {show_bytes(job.allocated_bytes)}"
        parts.append(held + (f" of {show_bytes(job.reserved_bytes)}" if job.reserved_bytes else ""))
    lines: list[RenderableType] = [Text(" · ".join(parts), overflow="fold")] if parts else []
    shares = {"host": job.phases or {}, "GPU": job.device_phases or {}}
    seen = [phase for phase in PHASES if any(phase in each for each in shares.values())]
    if seen:
        lines.append(_phase_table({name: each for name, each in shares.items() if each}, seen))
    return lines


def _phase_table(shares: dict[str, dict[str, float]], seen: Sequence[str]) -> Table:
    """Show the shares of a step by the host's and the GPU's clock; a phase that was not measured is n/a."""
    table = _grid(("step", "left"), *((phase, "right") for phase in seen))
    table.header_style = ""
    for column, phase in zip(table.columns[1:], seen, strict=True):
        column.header_style = column.style = PHASE_COLOURS[phase]
    for name, each in shares.items():
        table.add_row(Text(name, style=DIM), *(show_share(each.get(phase)) for phase in seen))
    return table


def phase_bar(shares: dict[str, float], room: int, paper: Paper) -> Text:
    """Draw one step as a bar of `room` characters."""
    bar = Text()
    left = 0.0
    for phase in PHASES:
        cells = round((left + shares.get(phase, 0.0)) * room) - round(left * room)
        left += shares.get(phase, 0.0)
        glyph = "█" if paper.has_colour and paper.has_blocks else phase[0]
        bar.append(glyph * cells, style=PHASE_COLOURS[phase])
    return bar


# The host and processes


def host_line(host: HostSample) -> Text:
    used, total = host.memory_used_bytes, host.memory_total_bytes
    cores = "" if host.cores is None else f" of {host.cores:g} cores"
    read, written = map(show_byte_rate, (host.disk_read_bytes_per_s, host.disk_write_bytes_per_s))
    received, sent = map(show_byte_rate, (host.network_received_bytes_per_s, host.network_sent_bytes_per_s))
    parts = [
        f"CPU {show_share(host.cpu_share)}{cores}",
        f"RAM {_memory(used, total)}".replace("  ", " "),
        f"disk {read} read, {written} written",
        f"net {received} in, {sent} out",
    ]
    if host.shm_free_bytes is not None:
        parts.append(f"shm {show_bytes(host.shm_free_bytes)} free")
    return Text(" · ".join(parts), overflow="fold")


ProcessColumn = tuple[str, int, Callable[[ProcessSample], str]]
PROCESS_COLUMNS: tuple[ProcessColumn, ...] = (
    ("GPU memory", 0, lambda process: _if_on_gpu(process, show_bytes(process.gpu_memory_bytes))),
    ("SM", 48, lambda process: _if_on_gpu(process, show_share(process.sm_share))),
    ("CPU", 56, lambda process: show(process.cpu_cores, "{:.2f}")),
    ("RAM", 66, lambda process: show_bytes(process.memory_bytes)),
)


def _if_on_gpu(process: ProcessSample, shown: str) -> str:
    return "" if process.gpu_index is None else shown


def process_table(sample: Sample, view: View, paper: Paper, *, rows: int) -> RenderableType:
    """Show at most `rows` processes; those of the job are bold."""
    sort = view.sorted_by(len(sample.gpus))
    columns = [
        column
        for column in PROCESS_COLUMNS
        if (paper.width >= column[1] or column[0] == sort) and (sample.gpus or column[0] not in ON_GPU)
    ]
    if sample.gpus:
        columns.insert(0, ("GPU", 0, _place))
    heads = [
        (f"{head}*" if head == sort else head, "left" if head == "GPU" else "right") for head, _, _ in columns
    ]
    table = _grid(("pid*" if sort == "pid" else "pid", "right"), *heads, ("name", "left"))
    found = sorted_processes(sample, sort)
    for process in found[:rows]:
        name = text(show(process.name), style=HEAD * process.of_job)
        table.add_row(str(process.pid), *(figure(process) for _, _, figure in columns), name)
    if len(found) > rows:
        table.add_row("", *("" for _ in columns), Text(f"and {len(found) - rows} more", style=DIM))
    return table


def _place(process: ProcessSample) -> str:
    place = "" if process.gpu_index is None else str(process.gpu_index)
    return place + ("" if process.mig_index is None else f".{process.mig_index}")
