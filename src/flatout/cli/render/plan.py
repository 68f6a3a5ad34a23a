"""A plan in the terminal: made for 80 columns, for a pipe, and for readers who see no colour.

The order is the order of the questions: what is configured and where, what it needs, what the device has,
what could be done, and what would be written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from flatout.cli.output import bullet, plain_console, plain_table, render_lines
from flatout.ground.units import UNKNOWN, show, show_bytes, show_seconds, show_share
from flatout.page.printable import printable

if TYPE_CHECKING:
    from flatout.planner.config.lengths import SequenceLengths
    from flatout.planner.config.settings import Setting, Settings, StageSettings
    from flatout.planner.fit.fits import Budget
    from flatout.planner.fit.show import StageMemory
    from flatout.planner.fit.suggestions import GroupFit, Suggestion
    from flatout.planner.forecast.load import ForecastRequest
    from flatout.planner.plan import ConfigFit, ConfigPlan

VERDICT_STYLES = {
    "does not fit": "bold red",
    "beyond the margin": "yellow",
    "under-used": "yellow",
    "well used": "green",
}


def render_overview(planned: ConfigPlan, *, console: Console | None = None) -> str:
    """Render `plan show` as text."""
    return render_lines(console or plain_console(), _overview_parts(planned))


def render_fit(fitted: ConfigFit, *, console: Console | None = None) -> str:
    """Render `plan fit` as text, with the diff at its end."""
    return render_lines(console or plain_console(), _fit_parts(fitted))


def _overview_parts(planned: ConfigPlan) -> Iterator[RenderableType]:
    overview = planned.overview
    yield from _headline(str(planned.opened.config.path), overview.settings, overview.budget)
    yield from _allocator(planned.request)
    yield ""
    yield _settings_table(overview.settings)
    yield ""
    yield _memory_table(overview.stages)
    if planned.missing:
        yield ""
        yield Text(f"memory is n/a: {planned.missing}")
    yield from _lengths(planned.lengths, [stage.settings.batch_size.value for stage in overview.stages])
    yield from _list("recommended:", overview.recommendations)
    yield from _list("notes:", [*overview.settings.notes, *overview.notes])


def _fit_parts(fitted: ConfigFit) -> Iterator[RenderableType]:
    fit = fitted.fit
    yield from _headline(str(fitted.opened.config.path), fit.settings, fit.budget)
    yield from _allocator(fitted.request)
    for group in fit.groups:
        yield ""
        yield from _group_parts(group, fitted)
    yield from _lengths(fitted.lengths, fitted.batch_sizes)
    yield from _list("notes:", fit.notes)
    yield from _list("warnings:", fitted.warnings)
    if fitted.unwritable is not None:
        yield from _list("this suggestion cannot be written:", [str(fitted.unwritable)])
    if fitted.edits:
        yield ""
        yield from (_diff_line(line) for line in fitted.diff.split("\n")[:-1])
    elif fitted.unwritable is None:
        yield ""
        yield Text("Nothing to change: the config already matches the plan.", style="green")


def _headline(path: str, settings: Settings, budget: Budget | None) -> Iterator[Text]:
    yield Text(printable(path), style="bold")
    yield Text(f"{settings.style.value}: {printable(settings.style.reason)}")
    if budget is None:
        yield Text("device: n/a (name one with --gpu or --gpu-memory)")
        return
    free = show_bytes(budget.free_bytes.value)
    yield Text(
        f"{printable(budget.device.name)}: {free} free of {show_bytes(budget.total_bytes)}"
        f" ({budget.free_bytes.reason}), {show_bytes(budget.usable_bytes)} at a margin of"
        f" {show_share(budget.margin)}"
    )


def _allocator(request: ForecastRequest | None) -> Iterator[Text]:
    if request is not None:
        kind = "expandable" if request.segments.value else "fixed"
        yield Text(f"allocator: {kind} segments ({request.segments.reason})")
        if request.native:
            yield Text("traced natively: PyTorch chose the kernels, for the GPU of this machine")


def _settings_table(settings: Settings) -> Table:
    """Make one row per knob; stages that agree are shown once."""
    table = plain_table("knob", "value", "from")
    for knob, found in _knobs(settings.stages).items():
        values = dict.fromkeys(_show_setting(setting) for setting in found)
        table.add_row(knob, printable(" / ".join(values)), Text(printable(_sources(found)), style="cyan"))
    table.add_row("ranks", str(settings.ranks.value), Text(printable(settings.ranks.reason), style="cyan"))
    return table


def _sources(found: Sequence[Setting[object] | None]) -> str:
    """Say where a knob stands; for a key that every stage has, only the first and the last place."""
    places = dict.fromkeys(setting.source for setting in found if setting is not None)
    keys = {source.partition(" (")[0] for source in places}
    if len(places) < 3 or len(keys) > 1:
        return ", ".join(places)
    inside = [source.partition(" (")[2].removesuffix(")") for source in places]
    return f"{keys.pop()} ({inside[0]} to {inside[-1]})"


def _knobs(stages: Sequence[StageSettings]) -> dict[str, list[Setting[object] | None]]:
    names = ("batch_size", "accumulation", "eval_batch_size", "precision", "checkpointing", "clip_norm")
    found: dict[str, list[Setting[object] | None]] = {
        name: [getattr(stage, name) for stage in stages] for name in (*names, "optimizer", "learning_rate")
    }
    for name in dict.fromkeys(name for stage in stages for name in stage.sizes):
        found[name] = [stage.sizes.get(name) for stage in stages]  # type: ignore[misc]
    return {name: settings for name, settings in found.items() if any(settings)}


def _show_setting(setting: Setting[object] | None) -> str:
    if setting is None or setting.value is None:
        return UNKNOWN
    value = setting.value
    return (
        ("off", "on")[value]
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _memory_table(stages: Sequence[StageMemory]) -> Table:
    numbers = ("batch", "effective", "training", "evaluation", "device", "fits up to")
    table = plain_table("stage", *numbers, "verdict", right=numbers)
    for stage in stages:
        table.add_row(
            printable(stage.name),
            str(stage.settings.batch_size.value),
            str(stage.effective_batch),
            show_bytes(stage.training.process_bytes if stage.training else None),
            show_bytes(stage.evaluation.process_bytes if stage.evaluation else None),
            show_share(stage.device_share),
            show(stage.largest.tight if stage.largest else None),
            Text(
                UNKNOWN if stage.verdict == "unknown" else stage.verdict,
                style=VERDICT_STYLES.get(stage.verdict, ""),
            ),
        )
    return table


def _group_parts(group: GroupFit, fitted: ConfigFit) -> Iterator[RenderableType]:
    names = ", ".join(stage.name for stage in group.stages)
    yield Text(printable(names), style="bold")
    first = group.stages[0]
    accumulations = "/".join(dict.fromkeys(str(stage.accumulation.value) for stage in group.stages))
    yield Text(f"configured: batch {first.batch_size.value} × accumulation {accumulations}")
    yield Text(printable(_bounds(group)))
    chosen = group.suggestion(fitted.choose)
    table = plain_table(
        "", "suggestion", "batch", "accum.", "effective", "ckpt", "memory", "free used", "step",
        right=("batch", "accum.", "effective", "memory", "free used", "step"),
    )  # fmt: skip
    for suggestion in group.suggestions:
        table.add_row(*_cells(suggestion, fitted.fit.budget, chosen=suggestion is chosen))
    yield table
    for suggestion in group.suggestions:
        yield bullet(
            f"{', '.join(suggestion.names)}: {suggestion.reason.reason}{_worst(suggestion, chosen)}"
            f"{_beyond(suggestion, fitted.fit.budget)}"
        )
    if len(chosen.peaks) > 1:
        yield Text(f"{chosen.names[0]} by stage: {printable(_by_stage(chosen, fitted.fit.budget))}")
    evaluation = group.evaluation
    yield Text(
        f"evaluation: batch {evaluation.batch_size}"
        + (f" → {evaluation.suggested}" if evaluation.suggested is not None else "")
        + f" needs {show_bytes(evaluation.peak.process_bytes)}"
        + (f", up to {evaluation.largest} fits" if evaluation.largest is not None else "")
        + f"; {evaluation.reason}"
    )


def _bounds(group: GroupFit) -> str:
    """Say how large a batch may be, and up to which size it never holds more than the margin."""
    why = "" if group.caution is None else f"; the margin is not fully used: {group.caution}"
    if group.safe is None:
        return f"a batch of up to {group.largest} fits, holding more than the margin while that is free{why}"
    if group.safe >= group.largest:
        return f"a batch of up to {group.largest} fits, and never holds more than the margin{why}"
    return (
        f"a batch of up to {group.largest} fits; up to {group.safe} it never holds more than the margin{why}"
    )


def _by_stage(suggestion: Suggestion, budget: Budget) -> str:
    """List what the stages need, equal ones once: "02_stage to 05_stage 8.14 GiB (36 %)"."""
    by_peak: dict[int, list[str]] = {}
    for name, peak in suggestion.peaks.items():
        by_peak.setdefault(peak.process_bytes, []).append(name)
    return ", ".join(
        f"{_range(names)} {show_bytes(needed)} ({show_share(needed / budget.free_bytes.value)})"
        for needed, names in by_peak.items()
    )


def _range(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"


def _lengths(lengths: SequenceLengths | None, batch_sizes: Sequence[int]) -> Iterator[RenderableType]:
    if lengths is None:
        return
    said = []
    for found in (lengths.of_batches(size) for size in dict.fromkeys(batch_sizes)):
        within = ", ".join(f"{share} of them stay within {length}" for share, length in found.within.items())
        reach = f"{show_share(found.longest_share)} reach {lengths.longest}"
        said.append(f"batches of {found.batch_size} rows drawn at random: {within}, {reach}")
    title = f"lengths of {lengths.num_sequences:,} sequences ({printable(lengths.source)}):"
    yield from _list(title, said)


def _cells(suggestion: Suggestion, budget: Budget, *, chosen: bool) -> Iterator[Text]:
    style = "bold" if chosen else ""
    used = suggestion.peak.process_bytes / budget.free_bytes.value
    for cell in (
        ">" if chosen else "",
        ", ".join(suggestion.names),
        str(suggestion.batch_size),
        "/".join(dict.fromkeys(str(number) for number in suggestion.accumulations.values())),
        "/".join(dict.fromkeys(str(number) for number in suggestion.effective_batches.values())),
        "on" if suggestion.checkpointing else "off",
        show_bytes(suggestion.peak.process_bytes),
        show_share(used),
        show_seconds(suggestion.step_s),
    ):
        yield Text(cell, style=style)


def _worst(suggestion: Suggestion, chosen: Suggestion) -> str:
    """Name the stage that needs most, if it is not the one of the chosen suggestion."""
    same = suggestion.worst_stage == chosen.worst_stage
    return "" if same else f"; {suggestion.worst_stage} needs most"


def _beyond(suggestion: Suggestion, budget: Budget) -> str:
    """Say that a job which trains within the margin may hold more: nothing stops it there."""
    if suggestion.peak.process_bytes <= budget.usable_bytes:
        return ""
    return f"; holds more than {show_bytes(budget.usable_bytes)} only while that is free"


def _diff_line(line: str) -> Text:
    style = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
    return Text(printable(line), style=style, no_wrap=True, overflow="ignore")


def _list(title: str, lines: Sequence[str]) -> Iterator[RenderableType]:
    if lines:
        yield ""
        yield Text(title)
        yield from map(bullet, lines)
