"""Drawings of a mean step: its phases as one bar, and the counterfactuals as dots with intervals.

Positions across are percentages and positions down are pixels, so a drawing fills a phone and a sheet of
paper alike while its text and its dots keep their size.  Colours are classes; the style sheet owns them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flatout.doctor.report import Reading
from flatout.measure import PHASES
from flatout.page.markup import Html, join, tag
from flatout.units import show_share


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
