"""Find when a run changed its speed: one change of its rate of steps that lasts until now.

The moment is the one that best divides the rates in two.  It counts only if the two parts hardly overlap, so
waves, a slow drift and single pauses do not count.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.ground.units import show_share, show_time

SMALLEST_CHANGE = 0.1
SHORTEST_S = 60.0  # of each part
SHORTEST_SHARE = 0.05  # the first steps of a run are slow in any case
FEWEST_POINTS = 8
OVERLAP_SHARE = 0.1  # of each part that may lie on the other's side
SUDDEN_SHARE = 0.6  # of the change, from the last quarter before it to the first after it

RatePoint = tuple[float, float, float]  # time, the seconds it stands for, steps per second


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A speed that the run has had since `since_s` seconds after its start."""

    since_s: float
    ratio: float  # of the rates, after over before

    def __str__(self) -> str:
        how = "slower" if self.ratio < 1 else "faster"
        return f"{show_share(abs(self.ratio - 1))} {how} since {show_time(self.since_s)}"


def find_change(points: Sequence[RatePoint], *, start_s: float) -> Change | None:
    """Find the change of points in order of time; `start_s` is the start of the run."""
    points = [point for point in points if point[2] > 0]
    if len(points) < 2 * FEWEST_POINTS:
        return None
    weights = list(itertools.accumulate(point[1] for point in points))
    sums = list(itertools.accumulate(point[1] * math.log(point[2]) for point in points))
    total, whole = weights[-1], sums[-1]
    shortest = max(SHORTEST_S, SHORTEST_SHARE * total)
    best, place = 0.0, None
    for index in range(FEWEST_POINTS, len(points) - FEWEST_POINTS + 1):
        before = weights[index - 1]
        after = total - before
        if before < shortest or after < min(shortest, SHORTEST_S):
            continue
        apart = abs((whole - sums[index - 1]) / after - sums[index - 1] / before)
        if apart * math.sqrt(before * after) > best:
            best, place = apart * math.sqrt(before * after), index
    if place is None:
        return None
    early, late = ([point[2] for point in part] for part in (points[:place], points[place:]))
    ratio = statistics.median(late) / statistics.median(early)
    # A drift changes little from the end of the one to the start of the other.
    near = statistics.median(late[: len(late) // 4]) / statistics.median(early[-(len(early) // 4) :])
    is_sudden = math.log(near) / math.log(ratio) > SUDDEN_SHARE if ratio != 1 else False
    lower, upper = (sorted(part) for part in ((late, early) if ratio < 1 else (early, late)))
    is_apart = lower[-1 - int(OVERLAP_SHARE * len(lower))] < upper[int(OVERLAP_SHARE * len(upper))]
    if abs(ratio - 1) < SMALLEST_CHANGE or not is_apart or not is_sudden:
        return None
    time_s, span_s, _ = points[place]
    return Change(since_s=max(time_s - span_s - start_s, 0.0), ratio=ratio)
