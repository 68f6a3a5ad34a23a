"""A run as one HTML page that needs nothing else: no host, no font, no script.

It shows what was live once: what bounded the run and when, where its steps went, memory of the device and
of the allocator, power, energy, loss and speed.  Style and escaping are those of a diagnosis's page.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flatout import __version__
from flatout.doctor.charts import phase_bar
from flatout.errors import BadInput
from flatout.monitor.past.curves import Series, chart, show_time, stacked_phases, strip
from flatout.monitor.past.recorded import Recorded
from flatout.monitor.past.summary import Summary, job_gpu, summarise
from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample, merge
from flatout.page.document import document
from flatout.page.markup import Html, code, facts, join, section, table, tag
from flatout.units import UNKNOWN, show_bytes, show_seconds, show_share

MOST_NOTES = 20
LONGEST_COMMAND = 400
COLOURS = ("first", "second", "third")

Value = Callable[[Sample], float | None]


def page(recorded: Recorded) -> str:
    """The whole document."""
    summary = summarise(recorded)
    parts = (
        _masthead(summary),
        _bounds(recorded, summary),
        *_curves(recorded, summary),
        _gpus(recorded),
        _notes(recorded),
    )
    return document(
        f"flatout: {summary.name}",
        parts,
        footer=_footer(recorded),
        version=__version__,
        styles=[("flatout.monitor.past", "report.css")],
    )


def write_page(recorded: Recorded, path: Path) -> None:
    """Under a temporary name, then renamed: a browser never opens half a page."""
    text = page(recorded)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror}") from None


def _masthead(summary: Summary) -> Html:
    started = datetime.datetime.fromtimestamp(summary.started_s)
    where = [f"{started:%Y-%m-%d %H:%M:%S}", f"{show_time(summary.duration_s)} long", summary.state]
    if summary.gpu_name:
        where.insert(0, summary.gpu_name)
    command = " ".join(summary.command)[:LONGEST_COMMAND]
    return tag(
        "header",
        tag("p", "Report of a run", class_="kicker"),
        tag("h1", summary.name),
        tag("p", code(command)) if command else Html(),
        tag("p", " · ".join(where), class_="where"),
        tag("p", headline(summary), class_="verdict"),
        facts(_figures(summary), kind="figures"),
    )


def headline(summary: Summary) -> str:
    """What bounded most of the run."""
    if not summary.bounds:
        return "What bounded this run is not known: it reported no step phases, or was too short."
    first = summary.bounds[0]
    sentence = first.sentence[:1].upper() + first.sentence[1:]
    return f"{sentence}." if first.share > 0.95 else f"{sentence} (in {show_share(first.share)} of the run)."


def _figures(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "step", show_seconds(summary.step_s)
    if summary.steps is not None:
        yield "steps", f"{summary.steps:,}"
    if summary.samples_per_s is not None:
        yield "samples per second", f"{summary.samples_per_s:.4g}"
    if summary.peak_allocated_bytes is not None:
        yield "peak memory of tensors", show_bytes(summary.peak_allocated_bytes)
    elif summary.device_memory_bytes is not None:
        yield "peak memory of the GPU", show_bytes(summary.device_memory_bytes)
    if summary.energy_per_step_j is not None:
        yield "energy per step", show_joules(summary.energy_per_step_j)
    if summary.energy_per_sample_j is not None:
        yield "energy per sample", show_joules(summary.energy_per_sample_j)
    if summary.energy_j is not None:
        yield "energy in all", show_joules(summary.energy_j)
    if summary.last_loss is not None:
        yield "last loss", f"{summary.last_loss:.4g}"


def show_joules(joules: float) -> str:
    """0.76 J, 48.9 J, 480 kJ, 2.1 MJ"""
    for scale, unit in ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")):
        if abs(joules) >= scale:
            return f"{joules / scale:.3g} {unit}"
    return f"{joules:.3g} J"


def _bounds(recorded: Recorded, summary: Summary) -> Html | None:
    if not summary.bounds:
        return None
    items = []
    for each in summary.bounds:
        rules = f" ({', '.join(each.rules)})" if each.rules else ""
        items.append(
            tag(
                "li",
                tag("i", class_=f"bound-{each.bound}"),
                tag("b", f"{each.bound}, {show_share(each.share)} of the run: "),
                each.sentence,
                tag("p", f"{each.action}{rules}"),
            )
        )
    drawn = strip(recorded.stretches, start_s=recorded.start_s, span_s=recorded.duration_s)
    return section("What bounded it", drawn, tag("ul", *items, class_="bounds"), anchor="bounds")


# Curves


def _job(name: str) -> Value:
    return lambda point: None if point.job is None else getattr(point.job, name)


def _gpu(name: str) -> Value:
    return lambda point: None if (gpu := job_gpu(point)) is None else getattr(gpu, name)


def _host(read: Callable[[HostSample], float | None]) -> Value:
    return lambda point: read(point.host)


def _curves(recorded: Recorded, summary: Summary) -> Iterator[Html | None]:
    drawing = _Drawing(recorded)
    gpu = job_gpu(merge(recorded.points))
    speed = drawing.chart(("it/s", _job("steps_per_s")), show=_plain)
    loss = drawing.chart(("loss", _job("loss")), show=_plain, from_zero=False)
    yield _section("Speed and loss", ("Steps per second", speed), ("Loss", loss))
    yield _phases(recorded, summary)
    busy = drawing.chart(
        ("a kernel runs", _gpu("utilisation_share")),
        ("processors active", _gpu("sm_active_share")),
        ("tensor cores active", _gpu("tensor_active_share")),
        show=show_share,
        top=1.0,
    )
    power = drawing.chart(
        ("power", _gpu("power_w")),
        show=lambda watts: f"{watts:.0f} W",
        limit=("limit", gpu.power_limit_w) if gpu is not None and gpu.power_limit_w else None,
    )
    yield _section("The GPU", ("How busy", busy), ("Power", power))
    device = drawing.chart(
        ("in use on the device", _gpu("memory_used_bytes")),
        ("reserved by torch", _job("reserved_bytes")),
        ("held by tensors", _job("allocated_bytes")),
        show=show_bytes,
        binary=True,
        limit=("capacity", float(gpu.memory_total_bytes))
        if gpu is not None and gpu.memory_total_bytes
        else None,
    )
    host = drawing.chart(
        ("in use on the host", _host(lambda each: each.memory_used_bytes)), show=show_bytes, binary=True
    )
    yield _section("Memory", ("GPU", device), ("Host", host))
    step = drawing.chart(("per step", _job("energy_per_step_j")), show=show_joules)
    sample = drawing.chart(("per sample", _job("energy_per_sample_j")), show=show_joules)
    yield _section("Energy", ("Per step", step), ("Per sample", sample))
    cpu = drawing.chart(("CPU", _host(lambda each: each.cpu_share)), show=show_share, top=1.0)
    disk = drawing.chart(
        ("read", _host(lambda each: each.disk_read_bytes_per_s)),
        ("written", _host(lambda each: each.disk_write_bytes_per_s)),
        show=lambda rate: f"{show_bytes(rate)}/s",
        binary=True,
    )
    yield _section("The host", ("Processors", cpu), ("Disks", disk))


class _Drawing:
    """Charts over the points of one run."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def chart(
        self,
        *lines: tuple[str, Value],
        show: Callable[[float], str],
        top: float | None = None,
        from_zero: bool = True,
        limit: tuple[str, float] | None = None,
        binary: bool = False,
    ) -> Html | None:
        """None where no line has a value."""
        recorded = self._recorded
        series = [
            Series(
                name=name,
                colour=colour,
                points=[(point.time_s - recorded.start_s, value(point)) for point in recorded.points],
            )
            for (name, value), colour in zip(lines, COLOURS, strict=False)
        ]
        if not any(each.is_known for each in series):
            return None
        return chart(
            series,
            span_s=recorded.duration_s,
            show=show,
            top=top,
            from_zero=from_zero,
            limit=limit,
            binary=binary,
        )


def _section(title: str, *charts: tuple[str, Html | None]) -> Html | None:
    """Charts side by side; None where there is none."""
    drawn = [tag("div", tag("h3", name), each) for name, each in charts if each is not None]
    if not drawn:
        return None
    return section(title, tag("div", *drawn, class_="pair") if len(drawn) > 1 else drawn[0])


def _phases(recorded: Recorded, summary: Summary) -> Html | None:
    if not summary.phases:
        return None
    bars = [phase_bar(summary.phases, label="host")]
    where, read = "host", lambda job: job.phases
    if summary.device_phases:
        bars.append(phase_bar(summary.device_phases, label="GPU"))
        where, read = "GPU", lambda job: job.device_phases
    points = [
        (point.time_s - recorded.start_s, shares)
        for point in recorded.points
        if (shares := _shares(point.job, read))
    ]
    drawn = Html()
    if len(points) > 1:
        label = f"shares of the step by the clock of the {where}, over time"
        drawn = join(
            (
                tag("h3", f"Over time, by the clock of the {where}"),
                stacked_phases(points, span_s=recorded.duration_s, label=label),
            )
        )
    return section("Where a step goes", *bars, drawn, anchor="step")


def _shares(
    job: JobSample | None, read: Callable[[JobSample], dict[str, float] | None]
) -> dict[str, float] | None:
    return None if job is None else read(job)


# Tables


def _gpus(recorded: Recorded) -> Html | None:
    whole = merge(recorded.points)
    if not whole.gpus:
        reason = whole.missing.get("gpus")
        return section("GPUs", tag("p", f"None: {reason}." if reason else "None.")) if reason else None
    heads = ("GPU", "name", "a kernel runs", "processors active", "peak memory", "power", "held down by")
    rows = [
        (
            str(gpu.index) if gpu.mig_index is None else f"{gpu.index}.{gpu.mig_index}",
            gpu.name or UNKNOWN,
            show_share(gpu.utilisation_share),
            show_share(gpu.sm_active_share),
            show_bytes(gpu.memory_used_bytes),
            UNKNOWN if gpu.power_w is None else f"{gpu.power_w:.0f} W",
            _held_down(gpu),
        )
        for gpu in whole.gpus
    ]
    note = (
        "Means over the run; memory is its peak. That a kernel runs does not say how much of the GPU it uses."
    )
    return section("GPUs", table(heads, rows, numbers=(2, 3, 4, 5)), tag("p", note, class_="note"))


def _held_down(gpu: GpuSample) -> str:
    if gpu.throttle_reasons is None:
        return UNKNOWN
    return ", ".join(reason for reason in gpu.throttle_reasons if reason != "idle") or "nothing"


def _notes(recorded: Recorded) -> Html | None:
    if not recorded.notes:
        return None
    rows: Sequence[tuple[str, str]] = [
        (show_time(time_s - recorded.start_s), note) for time_s, note in recorded.notes[-MOST_NOTES:]
    ]
    return section("What happened", table(("after", "what"), rows))


def _footer(recorded: Recorded) -> Html:
    pairs = [
        ("run", recorded.folder.name),
        ("process", str(recorded.run.pid)),
        ("points shown", str(len(recorded.points))),
        ("flatout", __version__),
    ]
    return tag("footer", facts(pairs))


def _plain(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else str(value)
