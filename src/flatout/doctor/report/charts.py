"""The charts of a diagnosis: counterfactuals with their intervals, and every observed step.

A long job gives more steps than a screen has room for; then a bar is the mean of a few consecutive steps
under the same arm.  One long step must not flatten all others: steps far beyond the median are cut off, and
the page says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from flatout.doctor.sentences import ArmReading
from flatout.ground.units import show_seconds
from flatout.measure import PHASES
from flatout.measure.evidence import Step
from flatout.page.charts import Axes, ChartRow, Column, Drawing, Key, RowChart, columns
from flatout.page.markup import Html, tag
from flatout.page.scales import Scale, zero_scale

HEIGHT = 190.0  # pixels of the timeline
MOST_BARS = 260  # more bars are thinner than a screen can show
CUT_OFF = 3.0  # medians

ARMS: dict[str, str] = {
    "warmup": "warm-up",
    "real": "as it is",
    "cached": "cached batches",
    "half": "half batches",
    "other": "other arms",
    "count": "counting",
    "attribution": "attribution",
    "stacks": "stacks",
    "kernels": "profiler",
    "memory": "memory",
}
SHORT: dict[str, str] = {
    "cached": "cached",
    "half": "half",
    "attribution": "lines",
    "count": "count",
}
WIDEST = 2.5  # times the full step, on the axis of arms


def whiskers(found: Sequence[ArmReading]) -> RowChart:
    """Draw each counterfactual's step as a fraction of the full one: a dot on its 95 % interval."""
    # an arm that is far slower ends at the border, or the ticks of the others would overlap
    end = min(WIDEST, max(1.1, *(reading.fraction_high * 1.05 for reading in found)))
    ticks = ((0.0, "0"), (0.5, "half the time"), (1.0, "no change"))
    chart = RowChart(across=Scale(low=0.0, high=end, ticks=ticks), height=40)
    rows = []
    for reading in found:
        marks = (
            chart.track(),
            chart.rule(0.5, "line", dashed=True),
            chart.rule(1.0),
            *chart.interval(min(end, reading.fraction_low), min(end, reading.fraction_high), "accent"),
            chart.dot(min(end, reading.fraction), "accent"),
        )
        spoken = f"{reading.fraction:.2f}, between {reading.fraction_low:.2f} and {reading.fraction_high:.2f}"
        label = f"{reading.label}: the step takes {spoken} of the full one"
        rows.append(
            ChartRow(name=reading.label, marks=marks, label=label, figure=reading.figure, note=reading.words)
        )
    return RowChart(rows=tuple(rows), across=chart.across, height=40, kind="rows told")


# The timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One step, or the mean of a few consecutive ones."""

    first: int  # index of its first step
    num_steps: int
    arm: str
    phases_s: dict[str, float]
    kept: bool  # at least one of its steps is in a mean

    @property
    def length_s(self) -> float:
        return sum(self.phases_s.values())

    @property
    def label(self) -> str:
        return f"step {self.first}" if self.num_steps == 1 else f"{self.num_steps} steps from {self.first}"

    @property
    def words(self) -> str:
        """The tooltip of the bar."""
        aside = "" if self.kept else ", not in any mean"
        split = ", ".join(f"{phase} {show_seconds(self.phases_s[phase])}" for phase in PHASES)
        return f"{self.label}, {ARMS.get(self.arm, self.arm)}{aside}: {show_seconds(self.length_s)} ({split})"


def bars(steps: Sequence[Step]) -> tuple[Bar, ...]:
    """Make at most about MOST_BARS bars; steps of different blocks never share one."""
    size = math.ceil(len(steps) / MOST_BARS)
    found: list[Bar] = []
    for _block, group in itertools.groupby(steps, key=lambda step: (step.block, step.arm)):
        block = list(group)
        found += [_mean(block[i : i + size]) for i in range(0, len(block), size)]
    return tuple(found)


def _mean(steps: Sequence[Step]) -> Bar:
    # A step that is in no mean of the evidence is in none here, unless there is nothing else to show.
    shown = [step for step in steps if step.kept] or steps
    return Bar(
        first=steps[0].index,
        num_steps=len(steps),
        arm=steps[0].arm,
        phases_s={
            phase: sum(step.phases_s.get(phase, 0.0) for step in shown) / len(shown) for phase in PHASES
        },
        kept=any(step.kept for step in steps),
    )


def timeline(drawn: Sequence[Bar]) -> Drawing:
    """Draw the bars one after another, each split by phase."""
    top = _top(drawn)
    shapes = [
        Column(
            left=place + 0.1,
            right=place + 0.9,
            parts=[(phase, bar.phases_s[phase]) for phase in PHASES],
            title=bar.words,
            is_pale=not bar.kept,
        )
        for place, bar in enumerate(drawn)
    ]
    axes = Axes(across=Scale(low=0.0, high=len(drawn)), up=zero_scale(top, show_seconds), height=HEIGHT)
    num_steps = sum(bar.num_steps for bar in drawn)
    label = f"{num_steps} steps split by phase; the scale ends at {show_seconds(top)}"
    return columns(shapes, axes, label=label, legend=[Key(name=phase, colour=phase) for phase in PHASES])


def arm_band(drawn: Sequence[Bar]) -> Html:
    """Draw the arms of the steps, below their bars."""
    cells = []
    for arm, group in itertools.groupby(drawn, key=lambda bar: bar.arm):
        block = list(group)
        cells.append(
            tag(
                "span",
                SHORT.get(arm, ARMS.get(arm, arm.partition(" ")[0])),
                class_="real" if arm == "real" else None,
                style=f"--c: var(--arm-{_colour(arm)}); width: {100 * len(block) / len(drawn):.3f}%",
                title=f"{ARMS.get(arm, arm)}: {sum(bar.num_steps for bar in block)} steps",
            )
        )
    return tag("div", *cells, class_="arms")


def arm_keys(steps: Sequence[Step]) -> list[Key]:
    """Return the colour of each arm, with its number of steps."""
    counts = {arm: sum(_colour(step.arm) == arm for step in steps) for arm in ARMS}
    return [Key(name=f"{ARMS[arm]} ({num})", colour=f"arm-{arm}") for arm, num in counts.items() if num]


def _colour(arm: str) -> str:
    return arm if arm in ARMS else "other"


def cut_off(drawn: Sequence[Bar]) -> tuple[Bar, ...]:
    """Return the bars that are longer than the scale, longest first."""
    top = _top(drawn)
    return tuple(sorted((bar for bar in drawn if bar.length_s > top), key=lambda bar: -bar.length_s))


def _top(drawn: Sequence[Bar]) -> float:
    lengths = [bar.length_s for bar in drawn]
    usual = median(lengths) if lengths else 0.0
    return max((length for length in lengths if length <= usual * CUT_OFF), default=0.0) or 1.0
