"""The timeline: every step that was observed, split by phase, over a band that says what was done to it.

A long job gives more steps than a screen has room for; then a bar is the mean of a few steps that ran in a
row under the same arm.  One long step must not flatten all others: what is far beyond the median is cut
off, and the page says so.  Positions across are percentages, positions down are pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from flatout.measure import PHASES
from flatout.measure.evidence import Arm, Step
from flatout.page.markup import Html, tag
from flatout.units import show_seconds

HEIGHT = 190  # pixels of the drawing
MOST_BARS = 260  # more than this is thinner than a screen can show
CUT_OFF = 3.0  # medians

ARMS: dict[Arm, str] = {
    "warmup": "warm-up",
    "real": "as it is",
    "cached": "cached batches",
    "half": "half batches",
    "count": "counting",
    "attribution": "attribution",
    "kernels": "profiler",
    "memory": "memory",
}
SHORT: dict[Arm, str] = {"cached": "cached", "half": "half", "attribution": "lines", "count": "count"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One step, or the mean of a few in a row."""

    first: int  # index of its first step
    num_steps: int
    arm: Arm
    phases_s: dict[str, float]
    kept: bool  # a step of it is in a mean

    @property
    def length_s(self) -> float:
        return sum(self.phases_s.values())

    @property
    def label(self) -> str:
        return f"step {self.first}" if self.num_steps == 1 else f"{self.num_steps} steps from {self.first}"


def bars(steps: Sequence[Step], *, most: int = MOST_BARS) -> tuple[Bar, ...]:
    """At most about `most` bars; steps of different blocks never share one."""
    size = math.ceil(len(steps) / most)
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


def timeline(drawn: Sequence[Bar]) -> Html:
    """The bars, an axis beside them, the band of arms below them."""
    top = _top(drawn)
    ticks = round_ticks(top)
    axis = [
        tag("text", show_seconds(tick), x=50, y=_down(tick, top) + 4, text_anchor="end") for tick in ticks
    ]
    lines = [tag("line", x1="0", x2="100%", y1=_down(tick, top), y2=_down(tick, top)) for tick in ticks]
    num_steps = sum(bar.num_steps for bar in drawn)
    return tag(
        "div",
        tag("svg", *axis, class_="axis", width=56, height=HEIGHT + 6, aria_hidden="true"),
        tag(
            "svg",
            tag("g", *lines, class_="grid"),
            *(_column(bar, position=i, num=len(drawn), top=top) for i, bar in enumerate(drawn)),
            width="100%",
            height=HEIGHT + 6,
            role="img",
            aria_label=f"{num_steps} steps split by phase; the scale ends at {show_seconds(top)}",
        ),
        tag("span"),
        _arm_band(drawn),
        class_="timeline",
    )


def _column(bar: Bar, *, position: int, num: int, top: float) -> Html:
    across = {"x": f"{100 * (position + 0.1) / num:.3f}%", "width": f"{100 * 0.8 / num:.3f}%"}
    parts = []
    base = 0.0
    for phase in PHASES:
        low, high = min(base, top), min(base + bar.phases_s[phase], top)
        base += bar.phases_s[phase]
        height = _down(low, top) - _down(high, top)
        if height > 0:
            parts.append(tag("rect", **across, y=_down(high, top), height=height, class_=phase))
    if bar.length_s > top:
        parts.append(tag("rect", **across, y=14, height=4, class_="cut"))
    aside = "" if bar.kept else ", not in any mean"
    split = ", ".join(f"{phase} {show_seconds(bar.phases_s[phase])}" for phase in PHASES)
    words = f"{bar.label}, {ARMS[bar.arm]}{aside}: {show_seconds(bar.length_s)} ({split})"
    return tag("g", tag("title", words), *parts, class_="step" if bar.kept else "step aside")


def _arm_band(drawn: Sequence[Bar]) -> Html:
    cells = []
    for arm, group in itertools.groupby(drawn, key=lambda bar: bar.arm):
        block = list(group)
        cells.append(
            tag(
                "span",
                SHORT.get(arm, ARMS[arm]),
                class_=f"arm-{arm}",
                style=f"width:{100 * len(block) / len(drawn):.3f}%",
                title=f"{ARMS[arm]}: {sum(bar.num_steps for bar in block)} steps",
            )
        )
    return tag("div", *cells, class_="arms")


def arm_legend(steps: Sequence[Step]) -> Html:
    """Which colour is which arm, with the number of steps of each."""
    counts = {arm: sum(step.arm == arm for step in steps) for arm in ARMS}
    items = [
        tag("li", tag("i", class_=f"arm-{arm}"), f"{ARMS[arm]} ({num})") for arm, num in counts.items() if num
    ]
    return tag("ul", *items, class_="legend")


def phase_legend() -> Html:
    return tag("ul", *(tag("li", tag("i", class_=phase), phase) for phase in PHASES), class_="legend")


def cut_off(drawn: Sequence[Bar]) -> tuple[Bar, ...]:
    """The bars that are longer than the scale, longest first."""
    top = _top(drawn)
    return tuple(sorted((bar for bar in drawn if bar.length_s > top), key=lambda bar: -bar.length_s))


def _top(drawn: Sequence[Bar]) -> float:
    lengths = [bar.length_s for bar in drawn]
    usual = median(lengths) if lengths else 0.0
    return max((length for length in lengths if length <= usual * CUT_OFF), default=0.0) or 1.0


def _down(seconds: float, top: float) -> float:
    return round(6 + HEIGHT * (1 - seconds / top), 2)


def round_ticks(top: float) -> list[float]:
    """Zero and two to five round numbers."""
    size = 10.0 ** math.floor(math.log10(top))
    step = next(size * factor for factor in (0.2, 0.5, 1, 2) if top / (size * factor) <= 5.5)
    return [step * i for i in range(math.floor(top / step) + 1)]
