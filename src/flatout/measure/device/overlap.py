"""How long something ran, and how much of that nothing else hides."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]


def merge_intervals(starts: Longs, ends: Longs) -> tuple[Longs, Longs]:
    """Return the union of intervals as disjoint intervals; `starts` is sorted."""
    if not len(starts):
        return starts, ends
    reach = np.maximum.accumulate(ends)
    first = np.concatenate(([True], starts[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return starts[first], reach[last]


def covered_length(spans: Longs) -> int:
    """Return the length of the union of (start, end) rows, in any order."""
    ordered = spans[np.argsort(spans[:, 0], kind="stable")]
    starts, ends = merge_intervals(ordered[:, 0], ordered[:, 1])
    return int((ends - starts).sum())


def communication(collectives: Longs, computation: Longs) -> tuple[int, int] | None:
    """Return the nanoseconds in collectives, and the part of them in which nothing computed."""
    if not len(collectives):
        return None
    both = np.concatenate((collectives, computation))
    return covered_length(collectives), covered_length(both) - covered_length(computation)
