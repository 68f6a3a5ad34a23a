"""A run of many steps, from a trace of two.

Under a cap, what the allocator does in the first step is not what it does in the tenth: segments that were
cut for one order of requests meet another, and where memory is tight they are handed back and asked for again
in every step.  Without a cap, a third step may find no hole where the second found one.  All steps after the
first ask for the same, so the second one is repeated: what it frees of the step before it, its gradients, is
what the step before it left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.memory.predict.allocator import Simulation, simulate
from flatout.memory.predict.replay import SizedTrace

Longs = NDArray[np.int64]
NUM_STEPS = 4  # the allocator settles in the second or third


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RepeatedSteps:
    """Births and deaths of several steps, and where each step after the first begins."""

    events: Longs
    num_bytes: Longs
    starts: tuple[int, ...]

    def simulate(self, *, cap_bytes: int | None = None, expandable_segments: bool = False) -> Simulation:
        """Return what the allocator does with all of them; the blocks of the trace's storages come first."""
        return simulate(
            self.events, self.num_bytes, cap_bytes=cap_bytes, expandable_segments=expandable_segments
        )

    def flushes(self, *, cap_bytes: int, expandable_segments: bool = False) -> int | None:
        """Count how often the allocator hands memory back in the last step; None if a step does not fit."""

        def done(events: Longs) -> Simulation:
            return simulate(
                events, self.num_bytes, cap_bytes=cap_bytes, expandable_segments=expandable_segments
            )

        whole = done(self.events)
        if whole.out_of_memory_at is not None:
            return None
        return whole.num_flushes - done(self.events[: self.starts[-1] if self.starts else 0]).num_flushes


def repeat_steps(found: SizedTrace, *, num_steps: int = NUM_STEPS) -> RepeatedSteps:
    """Repeat the second step of a trace up to `num_steps`, if it leaves as much as it found."""
    events, num_bytes = found.trace.events, found.num_bytes
    start = next((at for at, step, _phase in found.trace.marks if step == "next"), len(events))
    step = events[start:]
    plain = RepeatedSteps(events=events, num_bytes=num_bytes, starts=(start,) if len(step) else ())
    pairs = _handed_on(events, num_bytes, start)
    if pairs is None or not len(step):
        return plain
    before, after = pairs
    born = step[step >= 0]
    storages = np.where(step >= 0, step, ~step)
    named = np.arange(len(num_bytes))
    parts, sizes, starts = [events], [num_bytes], [start]
    for number in range(num_steps - 2):
        left = named[after] if number else after
        named[before] = left
        named[born] = len(num_bytes) + number * len(born) + np.arange(len(born))
        parts.append(np.where(step >= 0, named[storages], ~named[storages]))
        sizes.append(num_bytes[born])
        starts.append(len(events) + number * len(step))
    return RepeatedSteps(events=np.concatenate(parts), num_bytes=np.concatenate(sizes), starts=tuple(starts))


def _handed_on(events: Longs, num_bytes: Longs, start: int) -> tuple[Longs, Longs] | None:
    """Return what the second step frees of the first and what it leaves instead; None if they differ."""
    step = events[start:]
    born, died = step[step >= 0], ~step[step < 0]
    before, after = np.setdiff1d(died, born), np.setdiff1d(born, died)
    births = np.zeros(len(num_bytes), np.int64)
    at = np.flatnonzero(events >= 0)
    births[events[at]] = at
    before, after = before[np.argsort(births[before])], after[np.argsort(births[after])]
    if len(before) != len(after):
        return None
    if not np.array_equal(num_bytes[before], num_bytes[after]):  # born in another order: match them by size
        before = before[np.argsort(num_bytes[before], kind="stable")]
        after = after[np.argsort(num_bytes[after], kind="stable")]
    return (before, after) if np.array_equal(num_bytes[before], num_bytes[after]) else None
