"""The largest batch that a GPU takes.

Two answers, because the allocator has two limits.  Up to `safe` a step never asks for more than the GPU has.
Between `safe` and `limit` it still trains, but only because the allocator hands cached segments back and
asks again, which waits for the GPU, and a batch that is a little longer may fail.  Reserved bytes grow with
the batch nearly always, not always: segments are cut differently at every size.  So a bisection finds the
neighbourhood, every answer was simulated itself, and the sizes right above it were tried too.

A batch that fits where smaller ones do not fits by luck: a real allocator that differs in one segment has
none.  `unbroken_batch` is the largest one below which nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from flatout.decisions import Decision
from flatout.errors import BadInput
from flatout.memory.predict.allocator import Simulation, peak_allocated, simulate
from flatout.memory.predict.estimate import Log, add_workspaces
from flatout.memory.predict.replay import Replay, SizedTrace, sized
from flatout.memory.predict.samples import BATCH
from flatout.memory.trace.record import Trace
from flatout.units import show_bytes

MAX_BATCH = 2**20
MOST_LOOKS = 256
NUM_NEIGHBOURS = 4  # sizes above an answer that are tried before it is taken
LOOKED_BELOW = 0.10  # of a batch: how far below it others have to train too

StepAt: TypeAlias = Callable[[int], Trace | SizedTrace]


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """The answers; 0 where not even one sample fits."""

    safe: Decision[int]
    limit: Decision[int]
    safe_reserved_bytes: int | None  # at `safe`
    limit_flushes: int | None  # at `limit`


def largest_batch(
    step_at: Replay | StepAt,
    *,
    capacity_bytes: int,
    constants: tuple[int, ...] = (),
    context_bytes: int = 0,
    expandable_segments: bool = False,
    sizes: Mapping[str, int] | None = None,
    max_batch: int = MAX_BATCH,
) -> LargestBatch:
    """The largest batch within `capacity_bytes`, of which the CUDA context takes `context_bytes`.

    `step_at` is a replay, to which `sizes` gives what is not the batch, or a function of the batch size.
    A margin is the caller's: give a smaller capacity.
    """
    cap_bytes = capacity_bytes - context_bytes
    if cap_bytes <= 0:
        raise BadInput(
            f"a capacity of {show_bytes(capacity_bytes)} leaves nothing beside the CUDA context, which takes "
            f"{show_bytes(context_bytes)}"
        )
    search = _Search(
        log_at=_log_maker(step_at, constants, sizes or {}),
        cap_bytes=cap_bytes,
        expandable_segments=expandable_segments,
    )
    safe = _largest(search.is_safe, low=0, max_size=max_batch)
    limit = _largest(search.trains, low=safe, max_size=max_batch)
    return _explain(search, safe=safe, limit=limit, max_batch=max_batch)


def unbroken_batch(
    step_at: Replay | StepAt,
    *,
    capacity_bytes: int,
    expandable_segments: bool = False,
    looked_below: float = LOOKED_BELOW,
    max_batch: int = MAX_BATCH,
) -> int:
    """The largest batch that trains, with flushes, as all smaller ones near it do; 0: not even one sample.

    Near is one sample, and the share `looked_below` of the batch, of which `MOST_LOOKS` are tried.
    """
    search = _Search(
        log_at=_log_maker(step_at, (), {}), cap_bytes=capacity_bytes, expandable_segments=expandable_segments
    )
    size = _bisected(search.trains, low=0, max_size=max_batch)
    lowest = min(size - 1, int(size * (1 - looked_below)))
    stride = max(1, (size - lowest) // MOST_LOOKS)
    for below in range(size - 1, max(lowest, 1) - 1, -stride):
        if not search.trains(below):
            size = below - 1
    return max(size, 0)


def longest(lengths: Mapping[int, int]) -> int:
    """The length that decides, of a histogram length -> how often: one batch of the longest is enough."""
    seen = [length for length, count in lengths.items() if count > 0]
    if not seen:
        raise BadInput("the histogram of lengths is empty")
    return max(seen)


def _log_maker(
    step_at: Replay | StepAt, constants: tuple[int, ...], sizes: Mapping[str, int]
) -> Callable[[int], Log]:
    def log_at(batch_size: int) -> Log:
        if isinstance(step_at, Replay):
            return add_workspaces(step_at.at(**{**sizes, BATCH: batch_size}), constants)
        found = step_at(batch_size)
        return add_workspaces(sized(found) if isinstance(found, Trace) else found, constants)

    return log_at


class _Search:
    """What happens at one batch size under the cap, simulated once for each."""

    def __init__(self, *, log_at: Callable[[int], Log], cap_bytes: int, expandable_segments: bool) -> None:
        self.log_at = log_at
        self.cap_bytes = cap_bytes
        self.expandable_segments = expandable_segments
        self._known: dict[int, Simulation | None] = {}

    def run(self, batch_size: int) -> Simulation | None:
        """The step under the cap; None if it runs out of memory."""
        if batch_size not in self._known:
            log = self.log_at(batch_size)
            done = None
            if peak_allocated(log.events, log.num_bytes) <= self.cap_bytes:  # the cheap question first
                done = simulate(
                    log.events,
                    log.num_bytes,
                    cap_bytes=self.cap_bytes,
                    expandable_segments=self.expandable_segments,
                )
            self._known[batch_size] = done if done and done.out_of_memory_at is None else None
        return self._known[batch_size]

    def is_safe(self, batch_size: int) -> bool:
        done = self.run(batch_size)
        return done is not None and done.num_flushes == 0

    def trains(self, batch_size: int) -> bool:
        return self.run(batch_size) is not None


def _largest(holds: Callable[[int], bool], *, low: int, max_size: int) -> int:
    """The largest size for which `holds` is nearly surely true: doubling, bisection, then neighbours."""
    low = _bisected(holds, low=low, max_size=max_size)
    above = low + NUM_NEIGHBOURS
    while (size := next((size for size in range(min(above, max_size), low, -1) if holds(size)), 0)) > low:
        low = size
        above = low + NUM_NEIGHBOURS
    return low


def _bisected(holds: Callable[[int], bool], *, low: int, max_size: int) -> int:
    """A size for which `holds` is true and for the next one false."""
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


def _explain(search: _Search, *, safe: int, limit: int, max_batch: int) -> LargestBatch:
    cap = show_bytes(search.cap_bytes)
    at_safe = search.run(safe) if safe else None
    at_limit = search.run(limit) if limit else None
    safe_reason = f"one sample needs more than {cap} or memory handed back"
    limit_reason = f"one sample does not fit into {cap}"
    if at_safe:
        reserved = show_bytes(at_safe.peak_reserved_bytes)
        safe_reason = f"reserves {reserved} of {cap}; more samples need more than that"
        if safe == max_batch:
            safe_reason = f"reserves {reserved} of {cap}; no larger batch was asked for"
    if at_limit:
        times = "once" if at_limit.num_flushes == 1 else f"{at_limit.num_flushes} times"
        limit_reason = f"trains within {cap}, handing cached memory back {times} in two steps"
        if not at_limit.num_flushes:
            limit_reason = safe_reason
    return LargestBatch(
        safe=Decision(value=safe, reason=safe_reason, source="computed"),
        limit=Decision(value=limit, reason=limit_reason, source="computed"),
        safe_reserved_bytes=at_safe.peak_reserved_bytes if at_safe else None,
        limit_flushes=at_limit.num_flushes if at_limit else None,
    )
