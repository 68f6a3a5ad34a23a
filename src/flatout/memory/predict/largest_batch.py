"""The largest batch that a GPU takes.

Two answers, because the allocator has two limits.  Up to a *safe* batch a step never asks for more than the
GPU has.  Up to the *limit* it still trains, but only because the allocator hands cached segments back and
asks again, which waits for the GPU, and a batch that is a little longer may fail.  Reserved bytes grow with
the batch nearly always, not always: segments are cut differently at every size.  So a bisection finds the
neighbourhood, every answer was simulated itself, and the sizes right above it were tried too.

A batch that fits while smaller ones do not fits by luck, which a real allocator that differs in one segment
may not have.  The *unbroken* batch is the largest one below which nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from flatout.ground.errors import BadInput
from flatout.memory.predict.allocator import Simulation
from flatout.memory.predict.replay import SizedTrace

MAX_BATCH = 2**20
MOST_LOOKS = 256
NUM_NEIGHBOURS = 4  # sizes above an answer that are tried before it is taken
LOOKED_BELOW = 0.10  # of a batch: how far below it others have to train too

StepAt: TypeAlias = Callable[[int], SizedTrace]


class CapSearch:
    """Batches of one job under a cap of the allocator's bytes, each simulated once; 0: none fits."""

    def __init__(
        self,
        step_at: StepAt,
        *,
        cap_bytes: int,
        expandable_segments: bool = False,
        max_batch: int = MAX_BATCH,
    ) -> None:
        self.step_at = step_at
        self.cap_bytes = cap_bytes
        self.expandable_segments = expandable_segments
        self.max_batch = max_batch
        self._known: dict[int, Simulation | None] = {}

    def safe_batch(self) -> int:
        """Find the largest batch that trains without a flush."""
        return largest_that(self.is_safe, max_size=self.max_batch)

    def limit_batch(self) -> int:
        """Find the largest batch that trains."""
        return largest_that(self.trains, low=self.safe_batch(), max_size=self.max_batch)

    def unbroken_batch(self, *, looked_below: float = LOOKED_BELOW) -> int:
        """Find the largest batch that trains, with flushes, as all smaller ones near it do.

        It tries one sample less and `MOST_LOOKS` more batches, down to the share `looked_below` below it.
        """
        size = _bisect(self.trains, low=0, max_size=self.max_batch)
        lowest = min(size - 1, int(size * (1 - looked_below)))
        stride = max(1, (size - lowest) // MOST_LOOKS)
        for below in range(size - 1, max(lowest, 1) - 1, -stride):
            if not self.trains(below):
                size = below - 1
        return max(size, 0)

    def is_safe(self, batch_size: int) -> bool:
        done = self._run(batch_size)
        return done is not None and done.num_flushes == 0

    def trains(self, batch_size: int) -> bool:
        return self._run(batch_size) is not None

    def _run(self, batch_size: int) -> Simulation | None:
        """Simulate the step under the cap; None if it runs out of memory."""
        if batch_size not in self._known:
            step = self.step_at(batch_size)
            done = None
            if step.peak_allocated_bytes() <= self.cap_bytes:  # the cheap question first
                done = step.simulate(cap_bytes=self.cap_bytes, expandable_segments=self.expandable_segments)
            self._known[batch_size] = done if done and done.out_of_memory_at is None else None
        return self._known[batch_size]


def longest(lengths: Mapping[int, int]) -> int:
    """Return the longest length of a histogram (length -> how often): one such batch decides."""
    seen = [length for length, count in lengths.items() if count > 0]
    if not seen:
        raise BadInput("the histogram of lengths is empty")
    return max(seen)


def largest_that(holds: Callable[[int], bool], *, low: int = 0, max_size: int) -> int:
    """Find the largest size for which `holds`, nearly surely: by doubling, bisection, then neighbours."""
    low = _bisect(holds, low=low, max_size=max_size)
    above = low + NUM_NEIGHBOURS
    while (size := next((size for size in range(min(above, max_size), low, -1) if holds(size)), 0)) > low:
        low = size
        above = low + NUM_NEIGHBOURS
    return low


def _bisect(holds: Callable[[int], bool], *, low: int, max_size: int) -> int:
    """Find a size for which `holds` is true and for the next one false."""
    step = 1
    high = low + 1
    while high <= max_size and holds(high):
        low, step = high, step * 2
        high = low + step
    high = min(high, max_size + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
