"""A tuning as one HTML page: before and after, every trial with its interval and reason, and the proof."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flatout import __version__
from flatout.ground.units import UNKNOWN, show_interval, show_ratio, show_seconds
from flatout.page.charts import ChartRow, Mark, RowChart
from flatout.page.document import document
from flatout.page.inline import inline
from flatout.page.markup import Html, code, known, section, table, tag
from flatout.page.scales import Scale, round_ticks, zero_scale
from flatout.tuner.results.outcome import Tried, Tuning
from flatout.tuner.results.prescription import Kept, KeptPatch
from flatout.tuner.verdict import LEAST_GAIN, Gain

SLOW_START_S = 1.0
FARTHEST = 3.0  # times the largest gain: intervals may end beyond the axis
COLOURS = {"kept": "good", "wrong numbers": "bad", "failed": "bad"}
CLASSES = {
    "exact": "batches, losses, gradients and parameters must match bit for bit",
    "reordered": "sums in another order: errors against 64 bits, and losses, may differ only by rounding",
    "lossy": "other numbers: late losses over paired seeds must not be worse",
}


def page(done: Tuning) -> str:
    """Render the whole document."""
    prescription = done.prescription
    command = " ".join(prescription.command)
    machine = prescription.machine
    return document(
        command,
        (_before_and_after(done), _trials(done), _numbers(done), _noise(done), _diff(done.diff)),
        kind="Tuning of a training job",
        heading=code(command),
        where=(
            machine.device if machine else None,
            prescription.proof.date if prescription.proof else None,
        ),
        verdict=_verdict(done),
        figures=_figures(done),
        footer=_what_it_ran_on(done),
        version=machine.flatout if machine else __version__,
    )


def show_gain(gain: Gain | None) -> str:
    """Format a ratio with its interval."""
    if gain is None:
        return UNKNOWN
    if gain.num_pairs < 2:
        return show_ratio(gain.ratio)
    return f"{show_ratio(gain.ratio)} {show_interval(gain.low, gain.high)}"


def _verdict(done: Tuning) -> str:
    if done.total is None:
        return done.why_nothing()
    kept = ", ".join(str(each) for each in (*done.prescription.patch_doses(), *done.prescription.doses()))
    return f"{show_ratio(done.total.ratio)} faster with {kept}; the numbers were verified."


def _figures(done: Tuning) -> Iterator[tuple[str, str | None]]:
    yield "gain", show_gain(done.total) if done.total else "none"
    yield "step before", show_seconds(done.step_s)
    if done.total is not None:
        yield "step after", show_seconds(done.step_s / done.total.ratio)
    yield "tried", str(len(done.tried))
    yield "kept", str(len(done.prescription.treatments) + len(done.prescription.patches))
    yield "runs", str(done.num_trials)


def _before_and_after(done: Tuning) -> Html | None:
    if done.total is None:
        return None
    total = done.total
    across = zero_scale(done.step_s, show_seconds)
    chart = RowChart(across=across)
    after_s = done.step_s / total.ratio
    rows = (
        _bar(chart, "before", done.step_s, "rest"),
        _bar(chart, "after", after_s, "good", low=done.step_s / total.high, high=done.step_s / total.low),
    )
    start = done.job
    paid = ""
    if start is not None and start.pays_after is not None and start.extra_s > SLOW_START_S:
        paid = f" Starting takes {show_seconds(start.extra_s)} more, earned back in {start.pays_after} steps."
    note = (
        "Seconds of one step. The gain is the ratio of runs that alternate; its 95 % interval is the line "
        f"over the second bar: {show_gain(total)}.{paid}"
    )
    whole = inline(RowChart(rows=rows, across=across))
    return section("Before and after", whole, note=note, anchor="gain")


def _bar(
    chart: RowChart, name: str, seconds: float, colour: str, *, low: float | None = None, high: float = 0.0
) -> ChartRow:
    marks = [chart.bar(0.0, seconds, colour, title=f"{name}: {show_seconds(seconds)}", lane=(0.2, 0.8))]
    if low is not None:
        marks += chart.interval(low, high, "ink")
    said = show_seconds(seconds)
    return ChartRow(name=name, marks=tuple(marks), label=f"{name} {said}", figure=said)


def _trials(done: Tuning) -> Html:
    if not done.tried:
        return section("What was tried", tag("p", "Nothing: no treatment matches what was measured."))
    measured = [each for each in done.tried if each.gain is not None and each.gain.num_pairs >= 2]
    rows = [
        (code(str(each)), each.safety, each.answer, show_gain(each.gain), f"{each.summary}: {each.reason}")
        for each in done.tried
    ]
    listed = table(("treatment", "numbers", "answer", "gain", "what it does, and the reason"), rows)
    note = (
        "A dot is how many times faster the step was, a line its 95 % interval over pairs of runs, or blocks "
        f"of one run, that alternate. Kept is what lies above {LEAST_GAIN:g}× (dashed) with its whole "
        "interval, and computes the numbers of the job. Solid: 1×, no change."
    )
    chart = inline(_gains(measured)) if measured else Html()
    return section("What was tried", chart, listed, note=note if measured else "", anchor="trials")


def _gains(tried: list[Tried]) -> RowChart:
    gains = [each.gain for each in tried if each.gain is not None]
    low = min([0.8, *(max(each.low, 0.2) for each in gains)])
    most = FARTHEST * max(each.ratio for each in gains)  # few pairs have an interval without much of an end
    high = max([1.25, *(min(each.high, most) for each in gains)])
    across = _axis(low, high)
    chart = RowChart(across=across)
    rows = []
    for each in tried:
        gain = each.gain
        assert gain is not None
        colour = COLOURS.get(each.answer, "soft")
        marks: list[Mark] = [chart.track(), chart.rule(1.0), chart.rule(LEAST_GAIN, "accent", dashed=True)]
        marks += chart.interval(gain.low, gain.high, colour)
        marks.append(chart.dot(gain.ratio, colour, title=f"{each!s}: {show_gain(gain)}"))
        figure = f"{show_ratio(gain.ratio)}, {each.answer}"
        rows.append(ChartRow(name=str(each), marks=tuple(marks), label=f"{each!s}: {figure}", figure=figure))
    return RowChart(rows=tuple(rows), across=across)


def _axis(low: float, high: float) -> Scale:
    """Return an axis of ratios, logarithmic where they differ a lot."""
    if high <= 10:
        ticks = [value for value in round_ticks(high) if value >= low] if high > 3 else [low, 1.0, high]
        return Scale(low=low, high=high, ticks=tuple((value, show_ratio(value)) for value in ticks))
    powers = [10.0**power for power in range(math.floor(math.log10(high)) + 1)]
    return Scale(low=low, high=high, ticks=tuple((each, show_ratio(each)) for each in powers), bend=low)


def _numbers(done: Tuning) -> Html | None:
    kept: tuple[Kept | KeptPatch, ...] = (*done.prescription.patches, *done.prescription.treatments)
    if not kept:
        return None
    rows = [(code(each.name), each.safety, CLASSES.get(each.safety, ""), each.checked) for each in kept]
    listed = table(("kept", "numbers", "requirement", "what was found"), rows)
    return section(
        "Numbers", listed, note="A treatment that could not be compared is not kept.", anchor="numbers"
    )


def _noise(done: Tuning) -> Html:
    noise = done.noise
    said = (
        f"Without any change, {noise.num_pairs} pairs of the job's own runs give {show_gain(noise)}. "
        "A gain that is not clearly larger is noise."
    )
    if done.smallest_gain is not None:
        said += f" The smallest gain that such pairs can show here is {show_ratio(done.smallest_gain)}."
    if done.envelope is not None:
        said += f" {done.say_repeats()}"
    return section("The job against itself", tag("p", said), anchor="noise")


def _diff(diff: str) -> Html | None:
    if not diff:
        return None
    lines = [
        tag(
            "tr",
            tag("td", tag("b", line) if line.startswith("+") else line),
            class_="guilty" if line.startswith("-") else None,
        )
        for line in diff.splitlines()
    ]
    whole = tag("div", tag("table", tag("tbody", *lines), class_="source"), class_="scroll")
    return section("The change to the source", whole, anchor="diff")


def _what_it_ran_on(done: Tuning) -> Iterator[tuple[str, str | None]]:
    machine = done.prescription.machine
    if machine is None:
        return
    yield "device", machine.device
    yield "cpu", machine.cpu
    yield "cores", known(machine.cores, "{:g}".format)
    yield "one launch", known(machine.launch_s, show_seconds)
    yield "device to host", known(machine.device_to_host_s, show_seconds)
    yield "python", machine.python
    yield "torch", machine.torch
    yield "flatout", machine.flatout
