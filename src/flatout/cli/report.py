"""`flatout report` and `flatout compare`: a run afterwards, and two runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from flatout.cli import flags
from flatout.cli.output import facts_table, plain_console, plain_table, print_json, say_written
from flatout.ground.units import (
    UNKNOWN,
    show,
    show_bytes,
    show_joules,
    show_ratio,
    show_seconds,
    show_share,
    show_time,
)

if TYPE_CHECKING:
    from flatout.monitor.past.compare import Comparison, Difference, FigureUnit
    from flatout.monitor.past.engine_runs import EngineComparison, RunDigest
    from flatout.monitor.past.summary import Summary


def report(
    run: flags.Run,
    html: flags.Html = None,
    png: flags.Png = None,
    log: flags.Log = None,
    json_output: flags.Json = False,
) -> None:
    """Show how a run of any verb went.

    The report has its steps and figures and, for a watched run, what limited it.

    \b
    Examples:
      flatout report train
      flatout report .flatout/runs/20260115-100000-train-4711 --html run.html --png run.png
    """
    from flatout.api import report_run
    from flatout.monitor.past.summary import Summary

    summary = report_run(run, root=log, html=html, png=png)
    say_written(html, png)
    if json_output:
        print_json(summary.to_json())
        return
    plain_console().print(
        facts_table(_rows(summary) if isinstance(summary, Summary) else _engine_rows(summary))
    )
    for each in summary.bounds if isinstance(summary, Summary) else ():
        _sentence(f"{each.bound}, {show_share(each.share)} of the run: {each.sentence}; {each.action}")


def compare(
    first: flags.Run, second: flags.Run, log: flags.Log = None, json_output: flags.Json = False
) -> None:
    """Compare two runs, and say which differences are noise.

    Step time, phases, memory, power and energy are compared.  A difference counts if it exceeds how much each
    run varies within itself. The first tenth of both runs is left out. For two runs of an engine, the last
    value of each figure is compared.

    \b
    Examples:
      flatout compare 20260115-100000-train-4711 20260115-113000-train-4802
      flatout compare 4711 4802 --json
    """
    from flatout.api import compare_runs
    from flatout.monitor.past.compare import Comparison

    found = compare_runs(first, second, root=log)
    if json_output:
        print_json(found.to_json())
        return
    if not isinstance(found, Comparison):
        plain_console().print(_engine_table(found))
        return
    for number, summary in (("first", found.first), ("second", found.second)):
        _sentence(f"{number:<7} {summary.folder}, {summary.gpu_name or 'no GPU'}, {summary.ending}")
    plain_console().print(_comparison_table(found))
    for caveat in found.caveats:
        _sentence(f"note: {caveat}")
    if not found.that_matter:
        is_short = any(each.outcome == "too short to tell" for each in found.differences)
        typer.echo("too short to tell them apart" if is_short else "no difference that matters")


def _sentence(words: str) -> None:
    from flatout.page.printable import printable

    typer.echo(printable(words))


# One run


def _rows(summary: Summary) -> Iterator[tuple[str, str]]:
    from flatout.monitor.past.summary import last_loss

    yield "run", f"{summary.name} ({summary.folder}), {summary.ending}"
    yield "lasted", show_time(summary.duration_s)
    yield "GPU", summary.gpu_name or UNKNOWN
    yield "steps", show(summary.steps)
    yield "step", show_seconds(summary.step_s)
    for name, shares in (("host", summary.phases), ("GPU", summary.device_phases)):
        parts = [f"{phase} {show_share(share)}" for phase, share in (shares or {}).items() if share]
        if parts:
            yield f"step ({name})", ", ".join(parts)
    if summary.samples_per_s is not None:
        yield "samples/s", f"{summary.samples_per_s:.4g}"
    if summary.last_loss is not None:
        yield "last loss", last_loss(summary)
    if summary.gpu_name is not None:
        yield "kernel runs", f"{show_share(summary.utilisation_share)} of the time"
        yield "SM active", show_share(summary.sm_active_share)
        used, total = summary.device_memory_bytes, summary.device_memory_total_bytes
        yield "GPU memory", f"{show_bytes(used)} of {show_bytes(total)} at most"
        yield "power", show(summary.power_w, "{:.0f} W")
    if summary.peak_allocated_bytes is not None:
        yield "tensors", f"{show_bytes(summary.peak_allocated_bytes)} at most"
    if summary.energy_j is not None:
        parts = [show_joules(summary.energy_j)]
        for each, joules in (("step", summary.energy_per_step_j), ("sample", summary.energy_per_sample_j)):
            parts += [] if joules is None else [f"{show_joules(joules)} per {each}"]
        yield "energy", ", ".join(parts)
    used, total = summary.host_memory_bytes, summary.host_memory_total_bytes
    yield "host memory", f"{show_bytes(used)} of {show_bytes(total)} at most"


def _engine_rows(digest: RunDigest) -> Iterator[tuple[str, str]]:
    from flatout.ground.runs import show_state

    run = digest.run
    yield "run", f"{run.name} ({digest.folder.name}), {run.kind}, {show_state(run)}"
    yield "lasted", show_time(digest.duration_s)
    yield "steps", show(digest.steps)
    yield "step", show_seconds(digest.step_s)
    for name, value in digest.last.items():
        yield name, f"{value:.4g}"
    if run.kind == "steer":
        yield "search", f"flatout steer report {digest.folder} shows what it found"


# Two runs


def _engine_table(found: EngineComparison) -> Any:
    from rich.text import Text

    from flatout.page.printable import printable

    numbers = ("first", "second")
    table = plain_table("", *numbers, right=numbers)
    table.add_row("run", *(Text(printable(each.folder.name)) for each in (found.first, found.second)))
    for name, *values in found.figures:
        table.add_row(Text(printable(name)), *(show(value, "{:.4g}") for value in values))
    return table


STYLES = {"better": "green", "worse": "red", "higher": "yellow", "lower": "yellow"}


def _comparison_table(found: Comparison) -> Any:
    from rich.text import Text

    numbers = ("first", "second", "ratio", "95 %")
    table = plain_table("", *numbers, "", right=numbers, whole=numbers)
    for each in found.differences:
        table.add_row(
            each.name,
            show_in(each.unit, each.first),
            show_in(each.unit, each.second),
            show_ratio(each.ratio),
            _interval(each),
            Text(each.outcome, style=STYLES.get(each.outcome, "dim")),
        )
    return table


def _interval(each: Difference) -> str:
    if each.ratio_low is None or each.ratio_high is None:
        return ""
    return f"{each.ratio_low:.3g}–{each.ratio_high:.3g}"


SHOWN: dict[FigureUnit, Callable[[float | None], str]] = {
    "s": show_seconds,
    "bytes": show_bytes,
    "share": show_share,
    "J": show_joules,
}


def show_in(unit: FigureUnit, value: float | None) -> str:
    """Show a figure in its unit."""
    if unit in SHOWN:
        return SHOWN[unit](value)
    return show(value, "{:.4g} W" if unit == "W" else "{:.4g}/s")
