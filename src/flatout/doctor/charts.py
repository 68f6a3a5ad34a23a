"""The drawings of the page: the timeline of steps, the phase bars, the counterfactuals.

Positions across are percentages and positions down are pixels, so a drawing fills a phone and a sheet of
paper alike while its text and its dots keep their size.  Colours are classes; the style sheet owns them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import median

from flatout.doctor.markup import Html, join, tag
from flatout.doctor.report import Reading
from flatout.measure.evidence import PHASES, Arm, Step
from flatout.units import show_seconds, show_share

HEIGHT = 190  # pixels of the timeline
CUT_OFF = 3.0  # a step this many medians long is drawn cut off, or it would flatten all others

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


def timeline(steps: Sequence[Step]) -> Html:
    """Every step as a bar stacked by phase; below it what was done to the step."""
    top = _top(steps)
    ticks = _ticks(top)
    axis = [
        tag("text", show_seconds(tick), x=50, y=_down(tick, top) + 4, text_anchor="end") for tick in ticks
    ]
    lines = [tag("line", x1="0", x2="100%", y1=_down(tick, top), y2=_down(tick, top)) for tick in ticks]
    bars = [_bar(step, position=i, num=len(steps), top=top) for i, step in enumerate(steps)]
    return tag(
        "div",
        tag("svg", *axis, class_="axis", width=56, height=HEIGHT + 6, aria_hidden="true"),
        tag(
            "svg",
            tag("g", *lines, class_="grid"),
            *bars,
            width="100%",
            height=HEIGHT + 6,
            role="img",
            aria_label=f"{len(steps)} steps, each split by phase; the scale ends at {show_seconds(top)}",
        ),
        tag("span"),
        _arm_band(steps),
        class_="timeline",
    )


def _bar(step: Step, *, position: int, num: int, top: float) -> Html:
    left, width = 100 * (position + 0.1) / num, 100 * 0.8 / num
    parts = []
    base = 0.0
    for phase in PHASES:
        seconds = step.phases_s.get(phase, 0.0)
        low, high = min(base, top), min(base + seconds, top)
        base += seconds
        if high > low:
            y, height = _down(high, top), _down(low, top) - _down(high, top)
            parts.append(
                tag("rect", x=f"{left:.4f}%", y=y, width=f"{width:.4f}%", height=height, class_=phase)
            )
    if base > top:
        parts.append(tag("rect", x=f"{left:.4f}%", y=14, width=f"{width:.4f}%", height=4, class_="cut"))
    note = f"step {step.index}, {ARMS[step.arm]}: {show_seconds(step.step_s)}"
    note += "" if step.kept else ", not in any mean"
    split = ", ".join(f"{phase} {show_seconds(step.phases_s.get(phase, 0.0))}" for phase in PHASES)
    return tag("g", tag("title", f"{note} ({split})"), *parts, class_="step" if step.kept else "step aside")


def _arm_band(steps: Sequence[Step]) -> Html:
    blocks = [(arm, len(list(group))) for arm, group in itertools.groupby(steps, key=lambda step: step.arm)]
    cells = [
        tag(
            "span",
            SHORT.get(arm, ARMS[arm]),
            class_=f"arm-{arm}",
            style=f"flex-grow:{num}",
            title=f"{ARMS[arm]}: {num} steps",
        )
        for arm, num in blocks
    ]
    return tag("div", *cells, class_="arms")


def arm_legend(steps: Sequence[Step]) -> Html:
    """Which colour is which arm, with the number of steps of each."""
    present = [arm for arm in ARMS if any(step.arm == arm for step in steps)]
    items = [
        tag("li", tag("i", class_=f"arm-{arm}"), f"{ARMS[arm]} ({sum(step.arm == arm for step in steps)})")
        for arm in present
    ]
    return tag("ul", *items, class_="legend")


def phase_legend() -> Html:
    return tag("ul", *(tag("li", tag("i", class_=phase), phase) for phase in PHASES), class_="legend")


def cut_off(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps that are longer than the scale of the timeline."""
    top = _top(steps)
    return tuple(step for step in steps if sum(step.phases_s.values()) > top)


def _top(steps: Sequence[Step]) -> float:
    lengths = [sum(step.phases_s.values()) for step in steps]
    usual = median(lengths) if lengths else 0.0
    return max((length for length in lengths if length <= usual * CUT_OFF), default=0.0) or 1.0


def _down(seconds: float, top: float) -> float:
    return round(6 + HEIGHT * (1 - seconds / top), 2)


def _ticks(top: float) -> list[float]:
    """Zero and two to five round numbers."""
    size = 10.0 ** math.floor(math.log10(top))
    step = next(size * factor for factor in (0.2, 0.5, 1, 2) if top / (size * factor) <= 5.5)
    return [step * i for i in range(math.floor(top / step) + 1)]


def phase_bar(shares: Mapping[str, float], *, label: str) -> Html:
    """One step as one bar; what no phase accounts for stays empty."""
    rects = []
    left = 0.0
    for phase in PHASES:
        share = shares.get(phase, 0.0)
        if share > 0:
            rects.append(
                tag(
                    "rect",
                    tag("title", f"{phase}: {show_share(share)}"),
                    x=f"{100 * left:.4f}%",
                    width=f"{100 * share:.4f}%",
                    y=0,
                    height=26,
                    class_=phase,
                )
            )
        left += share
    spoken = ", ".join(f"{phase} {show_share(shares.get(phase, 0.0))}" for phase in PHASES)
    bar = tag("svg", *rects, width="100%", height=26, role="img", aria_label=f"{label}: {spoken}")
    return tag("div", tag("span", label), bar, class_="phase-bar")


def whiskers(found: Sequence[Reading]) -> Html:
    """Each counterfactual's step as a fraction of the full one: a dot, and its 95 % interval as a line."""
    end = max(1.1, *(reading.fraction_high * 1.05 for reading in found))
    rows = []
    for reading in found:
        spoken = f"{reading.fraction:.2f}, between {reading.fraction_low:.2f} and {reading.fraction_high:.2f}"
        rows.append(
            tag(
                "div",
                tag("b", reading.label),
                tag("span", reading.figure),
                tag("p", reading.words),
                class_="what",
            )
        )
        rows.append(
            tag(
                "svg",
                tag("line", x1=0, x2=_across(1.0, end), y1=20, y2=20, class_="track"),
                _rule(0.5, end, "half-way"),
                _rule(1.0, end, "same"),
                _span(reading, end),
                tag("circle", cx=_across(reading.fraction, end), cy=20, r=5),
                width="100%",
                height=40,
                role="img",
                aria_label=f"{reading.label}: the step takes {spoken} of the full one",
            )
        )
    labels = [
        tag("text", text, x=_across(value, end), y=12, text_anchor=anchor)
        for value, text, anchor in (
            (0.0, "0", "start"),
            (0.5, "half the time", "middle"),
            (1.0, "no change", "middle"),
        )
    ]
    foot = (tag("span"), tag("svg", *labels, class_="axis", width="100%", height=18, aria_hidden="true"))
    return tag("div", join(rows), *foot, class_="whiskers")


def _rule(value: float, end: float, name: str) -> Html:
    return tag("line", x1=_across(value, end), x2=_across(value, end), y1=0, y2=40, class_=name)


def _span(reading: Reading, end: float) -> Html:
    low, high = _across(reading.fraction_low, end), _across(reading.fraction_high, end)
    return tag(
        "g",
        tag("line", x1=low, x2=high, y1=20, y2=20),
        tag("line", x1=low, x2=low, y1=14, y2=26),
        tag("line", x1=high, x2=high, y1=14, y2=26),
        class_="interval",
    )


def _across(value: float, end: float) -> str:
    return f"{100 * value / end:.3f}%"
