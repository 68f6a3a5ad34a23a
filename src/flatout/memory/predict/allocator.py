"""PyTorch's CUDA caching allocator, simulated: what a step reserves of the GPU, and whether it fits at all.

PyTorch asks the driver for *segments* and cuts them into *blocks*.  A request is rounded up to 512 bytes.  Up
to 1 MiB it is served from the small pool, whose segments have 2 MiB; above that from the large pool, whose
segments have 20 MiB for requests below 10 MiB, and else the request's size rounded up to 2 MiB.  The smallest
free block that is large enough is taken, the lowest address among equals; what is left of it becomes a free
block if it is worth it (any rest in the small pool, more than 1 MiB in the large one: a smaller rest stays
with the block and counts as allocated).  A freed block merges with its free neighbours.  A later segment lies
below an earlier one, so that of equal blocks the one in the youngest segment is taken: the driver takes its
addresses from the process's own address space, which Linux gives out from the top down.  (With this order
the recorded allocations of 88 of 90 jobs on an H200 reserve what was measured to the byte, with the opposite
order those of 71.)  Segments are kept: when the driver has no more to give, those that are wholly free are
handed back (a flush, which waits for the GPU) and the request is tried once more before the step runs out of
memory.  With `expandable_segments` each pool is one segment that grows by pages of 2 or 20 MiB, and a flush
hands back every wholly free page.

The rules are those of the native backend with default settings and one stream.  Lengths and addresses count
in units of 512 bytes.  A free block is one integer, `length << SHIFT | address`, so that a sorted list of
them is in the order of best fit and one bisection finds the block.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.ground.units import round_up

UNIT_BYTES = 512
_MIB = 2**20 // UNIT_BYTES
_SMALL = _MIB  # the largest request of the small pool
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB  # from here on a request has a segment of its own size
_ROUND_SEGMENT = 2 * _MIB
_KEPT_REST = _MIB  # a rest of a large block up to this length is not split off
_SHIFT = 40
_ADDRESS = (1 << _SHIFT) - 1
_LARGE_BASE = _LARGE_SEGMENT << 22  # where the large pool's addresses begin when both pools are one segment


def expandable_segments_of(settings: str | None) -> bool:
    """Return whether the settings of `PYTORCH_CUDA_ALLOC_CONF` switch expandable segments on.

    The variable is read where the job runs; ask with the value that it has there.
    """
    options = (option.partition(":") for option in (settings or "").split(","))
    chosen = [value.strip().casefold() for name, _, value in options if name.strip() == "expandable_segments"]
    return bool(chosen) and chosen[-1] == "true"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Simulation:
    """What the allocator did with a sequence of births and deaths."""

    peak_allocated_bytes: int  # blocks in use, as `torch.cuda.max_memory_allocated` counts them
    peak_reserved_bytes: int
    reserved_bytes: int  # at the end
    num_flushes: int
    out_of_memory_at: int | None  # index of the birth that could not be served
    block_bytes: NDArray[np.int64]  # of each storage: the block it was given; 0 for one never born
    addresses: NDArray[np.int64]


def round_bytes(num_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round requests up to multiples of 512 bytes."""
    return -(-num_bytes // UNIT_BYTES) * UNIT_BYTES


def allocated_series(events: NDArray[np.int64], block_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes in use after each event."""
    births = events >= 0
    moved = block_bytes[np.where(births, events, ~events)]
    return np.cumsum(np.where(births, moved, -moved))


def peak_allocated(events: NDArray[np.int64], num_bytes: NDArray[np.int64]) -> int:
    """Return the most bytes in use at once, a lower bound of what a simulation says."""
    if not len(events):
        return 0
    return int(allocated_series(events, round_bytes(num_bytes)).max(initial=0))


def simulate(
    events: NDArray[np.int64],
    num_bytes: NDArray[np.int64],
    *,
    cap_bytes: int | None = None,
    expandable_segments: bool = False,
) -> Simulation:
    """Serve the births and deaths `events` of storages of `num_bytes`; at most `cap_bytes` are reserved."""
    units = -(-num_bytes // UNIT_BYTES)
    asked = events
    if len(units) and not units.all():  # nothing is asked for an empty tensor
        asked = events[units[np.where(events >= 0, events, ~events)] > 0]
    cap = None if cap_bytes is None else cap_bytes // UNIT_BYTES
    pools: _Pools = _Expandable(cap) if expandable_segments else _Segments(cap)
    lengths = units.tolist()
    starts = [0] * len(lengths)
    failed = _serve(asked.tolist(), lengths, starts, pools)
    served = events
    out_of_memory_at = None
    if failed is not None:
        out_of_memory_at = int(np.flatnonzero(events == failed)[0])
        served = events[:out_of_memory_at]
    born = np.zeros(len(units), dtype=bool)
    born[served[served >= 0]] = True
    block_bytes = np.where(born, np.array(lengths, dtype=np.int64) * UNIT_BYTES, 0)
    series = allocated_series(served, block_bytes)
    return Simulation(
        peak_allocated_bytes=int(series.max(initial=0)),
        peak_reserved_bytes=pools.peak_reserved * UNIT_BYTES,
        reserved_bytes=pools.reserved * UNIT_BYTES,
        num_flushes=pools.num_flushes,
        out_of_memory_at=out_of_memory_at,
        block_bytes=block_bytes,
        addresses=np.array(starts, dtype=np.int64) * UNIT_BYTES,
    )


def _serve(events: Sequence[int], lengths: list[int], starts: list[int], pools: _Pools) -> int | None:
    """Give every storage its block (into `starts`, `lengths`); the storage that found no memory, or None.

    A step has tens of thousands of events and a search for the largest batch replays it tens of times, hence
    one flat loop over integers.
    """
    small, large, by_start, by_end = pools.small, pools.large, pools.by_start, pools.by_end
    kept_rest = pools.kept_rest
    gaps = pools.gaps
    for event in events:
        if event < 0:
            start = starts[~event]
            length = lengths[~event]
            keys = small if length <= _SMALL else large
            end = start + length
            key = by_start.pop(end, 0)
            if key:
                del keys[bisect_left(keys, key)]
                end += key >> _SHIFT
            key = by_end.pop(start, 0)
            if key:
                del keys[bisect_left(keys, key)]
                start = key & _ADDRESS
            key = (end - start) << _SHIFT | start
            insort(keys, key)
            by_start[start] = key
            by_end[end] = key
            continue
        need = lengths[event]
        if need <= _SMALL:
            keys, kept = small, 0
        else:
            keys, kept = large, kept_rest
        index = bisect_left(keys, need << _SHIFT)
        if index == len(keys):
            key = pools.grow(need)
            if not key:
                return event
        else:
            if gaps:
                index = pools.prefer(keys, index)
            key = keys.pop(index)
            del by_start[key & _ADDRESS]
        start = key & _ADDRESS
        length = key >> _SHIFT
        starts[event] = start
        end = start + length
        if length - need > kept:
            start += need
            key = (end - start) << _SHIFT | start
            insort(keys, key)
            by_start[start] = key
            by_end[end] = key
        else:
            by_end.pop(end, 0)
            lengths[event] = length
    return None


class _Pools:
    """The free blocks of both pools, and how to get more memory when none is large enough."""

    def __init__(self, cap: int | None) -> None:
        self.cap = cap
        self.small: list[int] = []  # free blocks in the order of best fit
        self.large: list[int] = []
        self.by_start: dict[int, int] = {}  # the same blocks by their first and their last address
        self.by_end: dict[int, int] = {}
        self.gaps: dict[int, int] = {}  # of expandable segments: address -> length without memory behind it
        self.kept_rest = _KEPT_REST
        self.reserved = 0
        self.peak_reserved = 0
        self.num_flushes = 0

    def grow(self, need: int) -> int:
        """Return a free block of at least `need` from the driver's memory; 0 if there is none."""
        key = self.obtain(need)
        if not key:
            self.num_flushes += 1
            self.flush()
            key = self.obtain(need)
        return key

    def obtain(self, need: int) -> int:
        raise NotImplementedError

    def flush(self) -> None:
        """Hand back to the driver what is entirely free."""
        raise NotImplementedError

    def prefer(self, keys: list[int], index: int) -> int:
        """Return the index of the block to take; best fit found `index`."""
        return index

    def exceeds(self, length: int) -> bool:
        return self.cap is not None and self.reserved + length > self.cap

    def reserve(self, length: int) -> None:
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def insert(self, keys: list[int], start: int, end: int) -> None:
        if end > start:
            key = (end - start) << _SHIFT | start
            insort(keys, key)
            self.by_start[start] = key
            self.by_end[end] = key

    def remove(self, keys: list[int], key: int) -> None:
        start = key & _ADDRESS
        del keys[bisect_left(keys, key)]
        del self.by_start[start]
        del self.by_end[start + (key >> _SHIFT)]


def segment_length(need: int) -> int:
    """Return the segment to request from the driver for an allocation, both in units."""
    if need <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if need < _OWN_SEGMENT else round_up(need, _ROUND_SEGMENT)


class _Segments(_Pools):
    """Pools that grow by separate segments, each below all others."""

    def __init__(self, cap: int | None) -> None:
        super().__init__(cap)
        self.segments: dict[int, int] = {}  # address -> length
        self.frontier = _ADDRESS

    def obtain(self, need: int) -> int:
        length = segment_length(need)
        if self.exceeds(length):
            return 0
        self.frontier -= length + 1  # blocks of two segments never touch, so they never merge
        self.segments[self.frontier] = length
        self.reserve(length)
        return length << _SHIFT | self.frontier

    def flush(self) -> None:
        for keys in (self.large, self.small):
            for key in [key for key in keys if self.segments.get(key & _ADDRESS) == key >> _SHIFT]:
                self.remove(keys, key)
                del self.segments[key & _ADDRESS]
                self.reserved -= key >> _SHIFT


class _Expandable(_Pools):
    """Pools with one address range each, whose pages come and go; a gap is a range without memory."""

    def __init__(self, cap: int | None) -> None:
        super().__init__(cap)
        self.kept_rest = 0
        self.gaps[0] = _LARGE_BASE  # the small pool's address space, as good as endless
        self.gaps[_LARGE_BASE] = _ADDRESS // 2

    def prefer(self, keys: list[int], index: int) -> int:
        """Take a block before a gap later: it counts with the gap it could grow into."""
        room = self.room(keys[index])
        while index + 1 < len(keys) and (following := self.room(keys[index + 1])) < room:
            index, room = index + 1, following
        return index

    def room(self, key: int) -> int:
        length = key >> _SHIFT
        return length + self.gaps.get((key & _ADDRESS) + length, 0)

    def obtain(self, need: int) -> int:
        # PyTorch checks the whole request against its limit, even if free pages serve a part of it.
        if self.exceeds(segment_length(need)):
            return 0
        keys, page = (self.small, _SMALL_SEGMENT) if need <= _SMALL else (self.large, _LARGE_SEGMENT)
        start = self.lowest_room(need)
        end = start
        key = self.by_start.get(start, 0)
        if key:
            self.remove(keys, key)
            end += key >> _SHIFT
        while end - start < need:
            gap = self.gaps.pop(end)
            mapped = min(-(-(need - (end - start)) // page) * page, gap)
            if self.exceeds(mapped):
                self.gaps[end] = gap
                self.insert(keys, start, end)
                return 0
            self.reserve(mapped)
            end += mapped
            if mapped < gap:
                self.gaps[end] = gap - mapped
            elif following := self.by_start.get(end, 0):
                self.remove(keys, following)
                end += following >> _SHIFT
        return (end - start) << _SHIFT | start

    def lowest_room(self, need: int) -> int:
        """Find the lowest address from which free blocks and gaps hold `need` without a break."""
        for gap in sorted(self.gaps):
            if (gap >= _LARGE_BASE) != (need > _SMALL):
                continue
            before = self.by_end.get(gap, 0)
            start = before & _ADDRESS if before else gap
            end = start
            while end - start < need:
                length = self.gaps.get(end, 0) or self.by_start.get(end, 0) >> _SHIFT
                if not length:
                    break
                end += length
            if end - start >= need:
                return start
        raise AssertionError("the address space has no end")

    def flush(self) -> None:
        for keys, page in ((self.large, _LARGE_SEGMENT), (self.small, _SMALL_SEGMENT)):
            for key in list(keys):
                start = key & _ADDRESS
                end = start + (key >> _SHIFT)
                first = round_up(start, page)  # bases are multiples of a page, so are gaps
                last = end // page * page
                if first < last:
                    self.remove(keys, key)
                    self.insert(keys, start, first)
                    self.insert(keys, last, end)
                    self.reserved -= last - first
                    self.gaps[first] = last - first
        self.join_gaps()

    def join_gaps(self) -> None:
        joined: dict[int, int] = {}
        last = None
        for start in sorted(self.gaps):
            if last is not None and last + joined[last] == start and start != _LARGE_BASE:
                joined[last] += self.gaps[start]
            else:
                last = start
                joined[start] = self.gaps[start]
        self.gaps.clear()
        self.gaps.update(joined)
