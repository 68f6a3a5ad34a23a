"""A run as one HTML page.

It shows what the live view showed: what bounded the run and when, where its steps went, memory of the device
and of the allocator, power, energy, loss and speed.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator, Sequence

from flatout import __version__
from flatout.ground.units import UNKNOWN, show, show_bytes, show_joules, show_seconds, show_share, show_time
from flatout.monitor.past.charts import (
    CHARTS,
    bound_colour,
    bounds_over_time,
    phases_over_time,
    time_chart,
)
from flatout.monitor.past.outline import RunOutline
from flatout.monitor.past.summary import Summary, last_loss, summarise
from flatout.monitor.sample import GpuSample, merge
from flatout.page.charts import RowChart, stacked_row
from flatout.page.document import document
from flatout.page.inline import inline, paint
from flatout.page.markup import NOTHING, Html, code, known, section, table, tag

MOST_NOTES = 20
LONGEST_COMMAND = 400


def page(recorded: RunOutline) -> str:
    """Write the whole document."""
    summary = summarise(recorded)
    started = datetime.datetime.fromtimestamp(summary.started_s)
    command = " ".join(summary.command)[:LONGEST_COMMAND]
    length = f"{show_time(summary.duration_s)} long"
    return document(
        summary.name,
        (
            _bounds(recorded, summary),
            *_sections(recorded, summary),
            _gpus(recorded),
            _notes(recorded),
        ),
        kind="Report of a run",
        below_name=tag("p", code(command)) if command else NOTHING,
        where=(summary.gpu_name, f"{started:%Y-%m-%d %H:%M:%S}", length, summary.ending),
        verdict=headline(summary),
        figures=_figures(summary),
        footer=(
            ("run", recorded.folder.name),
            ("process", str(recorded.run.pid)),
            ("points shown", str(len(recorded.points))),
            ("flatout", __version__),
        ),
        version=__version__,
    )


def headline(summary: Summary) -> str:
    """Say what bounded most of the run; first of all, a loss that became NaN or infinite."""
    if summary.loss_lost_s is not None:
        return f"The loss is {last_loss(summary)}."
    if not summary.bounds:
        return "It is not known what limited this run: it reported no step phases, or was too short."
    first = summary.bounds[0]
    sentence = first.sentence[:1].upper() + first.sentence[1:]
    return f"{sentence}." if first.share > 0.95 else f"{sentence} (in {show_share(first.share)} of the run)."


def _figures(summary: Summary) -> Iterator[tuple[str, str | None]]:
    yield "step", show_seconds(summary.step_s)
    yield "steps", known(summary.steps, "{:,}".format)
    yield "samples per second", known(summary.samples_per_s, "{:.4g}".format)
    yield "peak memory of tensors", known(summary.peak_allocated_bytes, show_bytes)
    if summary.peak_allocated_bytes is None:
        yield "peak memory of the GPU", known(summary.device_memory_bytes, show_bytes)
    yield "energy per step", known(summary.energy_per_step_j, show_joules)
    yield "energy per sample", known(summary.energy_per_sample_j, show_joules)
    yield "energy in all", known(summary.energy_j, show_joules)
    yield "last loss", None if summary.last_loss is None else last_loss(summary)


def _bounds(recorded: RunOutline, summary: Summary) -> Html | None:
    if not summary.bounds:
        return None
    items = []
    for each in summary.bounds:
        rules = f" ({', '.join(each.rules)})" if each.rules else ""
        items.append(
            tag(
                "li",
                tag("i", style=f"--c: {paint(bound_colour(each.bound))}"),
                tag("b", f"{each.bound}, {show_share(each.share)} of the run: "),
                each.sentence,
                tag("p", f"{each.action}{rules}"),
            )
        )
    drawn = inline(bounds_over_time(recorded))
    return section("What bounded it", drawn, tag("ul", *items, class_="bounds"), anchor="bounds")


# Charts


def _sections(recorded: RunOutline, summary: Summary) -> Iterator[Html | None]:
    for title, wanted in itertools.groupby(CHARTS, key=lambda each: each.section):
        drawn = [
            tag("div", tag("h3", each.title), inline(chart))
            for each in wanted
            if (chart := time_chart(recorded, each)) is not None
        ]
        if drawn:
            yield section(title, tag("div", *drawn, class_="panels") if len(drawn) > 1 else drawn[0])
        if title == CHARTS[0].section:
            yield _phases(recorded, summary)


def _phases(recorded: RunOutline, summary: Summary) -> Html | None:
    if not summary.phases:
        return None
    known = [("host", summary.phases), *([("GPU", summary.device_phases)] if summary.device_phases else [])]
    bars = inline(RowChart(rows=tuple(stacked_row(name, shares) for name, shares in known)))
    found = phases_over_time(recorded)
    if found is None:
        return section("Where the time of a step goes", bars, anchor="step")
    clock, drawing = found
    over_time = tag("h3", f"Over time, by the clock of the {clock}")
    return section("Where the time of a step goes", bars, over_time, inline(drawing), anchor="step")


# Tables


def _gpus(recorded: RunOutline) -> Html | None:
    whole = merge(recorded.points)
    if not whole.gpus:
        reason = whole.missing.get("gpus")
        return section("GPUs", tag("p", f"None: {reason}." if reason else "None.")) if reason else None
    heads = ("GPU", "name", "a kernel runs", "processors active", "peak memory", "power", "held down by")
    rows = [
        (
            gpu.label,
            gpu.name or UNKNOWN,
            show_share(gpu.utilisation_share),
            show_share(gpu.sm_active_share),
            show_bytes(gpu.memory_used_bytes),
            show(gpu.power_w, "{:.0f} W"),
            _held_down(gpu),
        )
        for gpu in whole.gpus
    ]
    note = (
        "Means over the run; memory is its peak. A running kernel does not show how much of the GPU it uses."
    )
    return section("GPUs", table(heads, rows, numbers=(2, 3, 4, 5)), note=note)


def _held_down(gpu: GpuSample) -> str:
    if gpu.throttle_reasons is None:
        return UNKNOWN
    return ", ".join(reason for reason in gpu.throttle_reasons if reason != "idle") or "nothing"


def _notes(recorded: RunOutline) -> Html | None:
    if not recorded.notes:
        return None
    rows: Sequence[tuple[str, str]] = [
        (show_time(time_s - recorded.start_s), note) for time_s, note in recorded.notes[-MOST_NOTES:]
    ]
    return section("What happened", table(("after", "what"), rows))
