"""A curve of the last minutes in one row of characters.

Columns are slots of absolute time, so that a curve moves to the left as a whole and never shimmers, and a
gap in the samples is a gap in the curve.  An unknown value is a blank, which a zero is not: zero is the
lowest mark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

MARKS = "▁▂▃▄▅▆▇█"
PLAIN_MARKS = "_.-=+*#@"  # for terminals without these characters


def sparkline(
    points: Iterable[tuple[float, float | None]],
    *,
    width: int,
    span_s: float,
    top: float | None = None,
    marks: str = MARKS,
) -> str:
    """The last `span_s` seconds of (time, value), `width` characters; `top` is the value of a full mark.

    Without `top` the highest value of the curve is.
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
