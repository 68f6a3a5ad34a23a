"""Whether a curve of memory rises steadily, and how fast.

A rise that ends in an out-of-memory looks unlike the growth of a cache, which jumps a few times and stays:
it goes up in most of the steps of the curve, and its second half rises no more slowly than half as fast as
its first.  The slope is Theil's: the median of the slopes between all pairs, which one jump does not move.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_POINTS = 8
SHORTEST_S = 30.0  # any program grows for a few seconds
STEADY_SHARE = 0.6
MOST_POINTS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """A steady rise."""

    bytes_per_s: float
    span_s: float
    steady_share: float  # of the steps of the curve that went up


def rising(points: Sequence[tuple[float, float | None]], *, least: float) -> Rise | None:
    """The rise of (seconds, bytes); None where it is none, or smaller than `least` bytes in all."""
    known = [(time_s, value) for time_s, value in points if value is not None]
    known = known[:: max(len(known) // MOST_POINTS, 1)]
    if len(known) < FEWEST_POINTS:
        return None
    (first_s, first), (last_s, last) = known[0], known[-1]
    grown, span_s = last - first, last_s - first_s
    if grown < least or span_s < SHORTEST_S:
        return None
    ups = [after > before for (_, before), (_, after) in itertools.pairwise(known)]
    steady_share = sum(ups) / len(ups)
    slope, later = _slope(known), _slope(known[len(known) // 2 :])
    if steady_share < STEADY_SHARE or slope <= 0 or later < slope / 2:
        return None
    return Rise(bytes_per_s=slope, span_s=span_s, steady_share=steady_share)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    pairs = itertools.combinations(points, 2)
    return statistics.median((b - a) / (t - s) for (s, a), (t, b) in pairs if t > s)
