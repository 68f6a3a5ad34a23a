"""The fast simulation against a slow, plain one; and what any allocator must keep."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.memory.predict.allocator import (
    Simulation,
    _Expandable,
    _serve,
    allocated_series,
    expandable_segments_of,
    peak_allocated,
    round_bytes,
    simulate,
)

KIB, MIB = 2**10, 2**20
PAGES = {True: 2 * MIB, False: 20 * MIB}


# A plain reference: blocks as objects in address order, every search a scan


@dataclass
class Block:
    size: int
    state: str  # "used", "free", "unmapped"


@dataclass
class Segment:
    is_small: bool
    blocks: list[Block]

    def place(self, block: Block) -> int:
        index = next(i for i, found in enumerate(self.blocks) if found is block)
        return sum(before.size for before in self.blocks[:index])

    def merge(self) -> None:
        merged: list[Block] = []
        for block in self.blocks:
            if merged and merged[-1].state == block.state != "used":
                merged[-1].size += block.size
            else:
                merged.append(block)
        self.blocks = merged

    def next_unmapped(self, block: Block) -> int:
        index = next(i for i, found in enumerate(self.blocks) if found is block)
        after = self.blocks[index + 1 : index + 2]
        return after[0].size if after and after[0].state == "unmapped" else 0


@dataclass
class Reference:
    cap: int | None
    expandable: bool
    segments: list[Segment] = field(default_factory=list)
    reserved: int = 0
    peak_reserved: int = 0
    flushes: int = 0

    def allocate(self, num_bytes: int) -> tuple[Segment, Block] | None:
        size = -(-num_bytes // 512) * 512
        found = self.best_fit(size) or self.grow(size)
        if found is None:
            self.flushes += 1
            self.flush()
            found = self.grow(size)
        if found is None:
            return None
        segment, block = found
        rest = block.size - size
        if rest >= 512 if segment.is_small or self.expandable else rest > MIB:
            index = next(i for i, other in enumerate(segment.blocks) if other is block)
            segment.blocks.insert(index + 1, Block(rest, "free"))
            block.size = size
        block.state = "used"
        return segment, block

    def best_fit(self, size: int) -> tuple[Segment, Block] | None:
        free = [
            (block.size, -number, segment.place(block), segment, block)  # later segments lie lower
            for number, segment in enumerate(self.segments)
            if segment.is_small == (size <= MIB)
            for block in segment.blocks
            if block.state == "free" and block.size >= size
        ]
        free.sort(key=lambda found: found[:3])
        if not free:
            return None
        if self.expandable:
            room = [found[0] + found[3].next_unmapped(found[4]) for found in free]
            index = 0
            while index + 1 < len(free) and room[index + 1] < room[index]:
                index += 1
            return free[index][3:]
        return free[0][3:]

    def grow(self, size: int) -> tuple[Segment, Block] | None:
        is_small = size <= MIB
        length = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.cap is not None and self.reserved + length > self.cap:
            return None
        if self.expandable:
            return self.expand(size)
        segment = Segment(is_small, [Block(length, "free")])
        self.segments.append(segment)
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return segment, segment.blocks[0]

    def expand(self, size: int) -> tuple[Segment, Block] | None:
        is_small = size <= MIB
        page = PAGES[is_small]
        segment = next((found for found in self.segments if found.is_small == is_small), None)
        if segment is None:
            segment = Segment(is_small, [Block(10**15 // page * page, "unmapped")])
            self.segments.append(segment)
        start, stop = self.run_with_room(segment, size)
        have = 0
        for block in segment.blocks[start:stop]:
            if have >= size:
                break
            if block.state == "free":
                have += block.size
                continue
            wanted = min(-(-(size - have) // page) * page, block.size)
            if self.cap is not None and self.reserved + wanted > self.cap:
                segment.merge()
                return None
            self.reserved += wanted
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            index = next(i for i, other in enumerate(segment.blocks) if other is block)
            left = [Block(block.size - wanted, "unmapped")] if wanted < block.size else []
            segment.blocks[index : index + 1] = [Block(wanted, "free"), *left]
            have += wanted
        address = sum(block.size for block in segment.blocks[:start])
        segment.merge()
        return segment, next(block for block in segment.blocks if segment.place(block) == address)

    def run_with_room(self, segment: Segment, size: int) -> tuple[int, int]:
        for index, block in enumerate(segment.blocks):
            if block.state != "unmapped":
                continue
            start = index - 1 if index and segment.blocks[index - 1].state == "free" else index
            stop, room = start, 0
            while stop < len(segment.blocks) and segment.blocks[stop].state != "used" and room < size:
                room += segment.blocks[stop].size
                stop += 1
            if room >= size:
                return start, stop
        raise AssertionError

    def flush(self) -> None:
        if not self.expandable:
            whole = [s for s in self.segments if len(s.blocks) == 1 and s.blocks[0].state == "free"]
            self.reserved -= sum(segment.blocks[0].size for segment in whole)
            self.segments = [s for s in self.segments if all(s is not other for other in whole)]
            return
        for segment in self.segments:
            page = PAGES[segment.is_small]
            blocks: list[Block] = []
            address = 0
            for block in segment.blocks:
                first, last = -(-address // page) * page, (address + block.size) // page * page
                if block.state == "free" and first < last:
                    end = address + block.size
                    self.reserved -= last - first
                    pieces = [
                        Block(first - address, "free"),
                        Block(last - first, "unmapped"),
                        Block(end - last, "free"),
                    ]
                    blocks += [piece for piece in pieces if piece.size]
                else:
                    blocks.append(block)
                address += block.size
            segment.blocks = blocks
            segment.merge()


def run_reference(
    events: list[int], num_bytes: list[int], cap: int | None, expandable: bool
) -> tuple[Reference, dict[int, int], int | None]:
    reference = Reference(cap, expandable)
    given_blocks: dict[int, tuple[Segment, Block]] = {}
    sizes: dict[int, int] = {}
    for index, event in enumerate(events):
        if event < 0:
            segment, block = given_blocks.pop(~event)
            block.state = "free"
            segment.merge()
            continue
        found = reference.allocate(num_bytes[event])
        if found is None:
            return reference, sizes, index
        given_blocks[event] = found
        sizes[event] = found[1].size
    return reference, sizes, None


# Sequences of births and deaths

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, MIB),
    st.sampled_from([512, MIB - 512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB, 19 * MIB + 512]),
    st.integers(MIB, 12 * MIB),
    st.integers(10 * MIB, 60 * MIB),
)


def random_events(seed: int, num_storages: int, *, most_alive: int = 40) -> list[int]:
    rng = random.Random(seed)
    events: list[int] = []
    alive: list[int] = []
    for storage in range(num_storages):
        while alive and (rng.random() < 0.45 or len(alive) == most_alive):
            events.append(~alive.pop(rng.randrange(len(alive))))
        events.append(storage)
        alive.append(storage)
    return events


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    num_bytes = draw(st.lists(SIZES, min_size=1, max_size=60))
    return random_events(draw(st.integers(0, 2**32)), len(num_bytes)), num_bytes


def run(
    events: list[int], num_bytes: list[int], *, cap: int | None = None, expandable: bool = False
) -> Simulation:
    return simulate(
        np.array(events, dtype=np.int64),
        np.array(num_bytes, dtype=np.int64),
        cap_bytes=cap,
        expandable_segments=expandable,
    )


@given(sequences(), st.booleans(), st.one_of(st.none(), st.integers(2 * MIB, 400 * MIB)))
def test_it_does_what_the_plain_one_does(
    sequence: tuple[list[int], list[int]], expandable: bool, cap: int | None
) -> None:
    events, num_bytes = sequence
    fast = run(events, num_bytes, cap=cap, expandable=expandable)
    slow, sizes, failed_at = run_reference(events, num_bytes, cap, expandable)
    assert fast.out_of_memory_at == failed_at
    assert fast.num_flushes == slow.flushes
    assert fast.peak_reserved_bytes == slow.peak_reserved
    assert fast.reserved_bytes == slow.reserved
    assert {i: size for i, size in enumerate(fast.block_bytes.tolist()) if size} == sizes


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_it_does_what_the_plain_one_does_over_a_long_run_with_little_room(
    seed: int, expandable: bool
) -> None:
    rng = random.Random(seed)
    num_bytes = [int(2 ** rng.uniform(16, 26.5)) for _ in range(500)]
    events = random_events(seed, len(num_bytes))
    free = run(events, num_bytes, expandable=expandable)
    num_flushes = []
    for share in (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.8):
        cap = int(share * free.peak_reserved_bytes)
        fast = run(events, num_bytes, cap=cap, expandable=expandable)
        slow, sizes, failed_at = run_reference(events, num_bytes, cap, expandable)
        assert (fast.peak_reserved_bytes, fast.num_flushes) == (slow.peak_reserved, slow.flushes)
        assert (fast.reserved_bytes, fast.out_of_memory_at) == (slow.reserved, failed_at)
        assert {i: size for i, size in enumerate(fast.block_bytes.tolist()) if size} == sizes
        num_flushes.append(fast.num_flushes)
    assert max(num_flushes) > 0


@given(sequences(), st.booleans(), st.one_of(st.none(), st.integers(40 * MIB, 400 * MIB)))
def test_blocks_in_use_never_overlap(
    sequence: tuple[list[int], list[int]], expandable: bool, cap: int | None
) -> None:
    events, num_bytes = sequence
    done = run(events, num_bytes, cap=cap, expandable=expandable)
    in_use: set[int] = set()
    for event in events[: done.out_of_memory_at]:
        if event < 0:
            in_use.remove(~event)
            continue
        start, end = done.addresses[event], done.addresses[event] + done.block_bytes[event]
        for other in in_use:
            other_end = done.addresses[other] + done.block_bytes[other]
            assert end <= done.addresses[other] or other_end <= start
        in_use.add(event)


@given(sequences(), st.booleans())
def test_reserved_holds_allocated_and_allocated_holds_what_was_asked(
    sequence: tuple[list[int], list[int]], expandable: bool
) -> None:
    events, num_bytes = sequence
    done = run(events, num_bytes, expandable=expandable)
    asked = np.array(num_bytes, dtype=np.int64)
    moves = np.array(events, dtype=np.int64)
    requested = int(allocated_series(moves, asked).max())
    assert requested <= peak_allocated(moves, asked) <= done.peak_allocated_bytes <= done.peak_reserved_bytes
    assert (done.block_bytes >= asked).all()
    assert done.num_flushes == 0


def never_reached(free: Simulation, num_bytes: list[int]) -> int:
    """A cap that leaves room for one more request, which is held against it even if free pages serve it."""
    return -(-(free.peak_reserved_bytes + max(num_bytes)) // (20 * MIB)) * 20 * MIB + 20 * MIB


@given(sequences(), st.booleans())
def test_one_flush_hands_back_all_that_was_freed(
    sequence: tuple[list[int], list[int]], expandable: bool
) -> None:
    """After everything died, a request that nothing cached can serve leaves only its own segment."""
    events, num_bytes = sequence
    died = {~event for event in events if event < 0}
    events = events + [~event for event in events if event >= 0 and event not in died]
    before = run(events, num_bytes, expandable=expandable)
    last = never_reached(before, num_bytes)
    done = run([*events, len(num_bytes)], [*num_bytes, last], cap=last, expandable=expandable)
    assert (done.num_flushes, done.out_of_memory_at, done.reserved_bytes) == (1, None, last)


@given(sequences(), st.booleans())
def test_a_cap_that_is_never_reached_changes_nothing(
    sequence: tuple[list[int], list[int]], expandable: bool
) -> None:
    events, num_bytes = sequence
    free = run(events, num_bytes, expandable=expandable)
    capped = run(events, num_bytes, cap=never_reached(free, num_bytes), expandable=expandable)
    assert (capped.num_flushes, capped.out_of_memory_at) == (0, None)
    assert (capped.addresses == free.addresses).all()


@pytest.mark.parametrize(
    ("num_bytes", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments_have_the_sizes_of_pytorch(num_bytes: int, reserved: int) -> None:
    assert run([0], [num_bytes]).reserved_bytes == reserved


def test_a_rest_up_to_one_mebibyte_stays_with_a_large_block() -> None:
    assert run([0], [19 * MIB]).block_bytes.tolist() == [20 * MIB]
    assert run([0], [19 * MIB - 512]).block_bytes.tolist() == [19 * MIB - 512]
    assert run([0], [11 * MIB - 512], expandable=True).block_bytes.tolist() == [11 * MIB - 512]
    split = run([0, ~0, 1], [32 * MIB, 30 * MIB])
    assert split.block_bytes.tolist() == [32 * MIB, 30 * MIB]


def test_expandable_segments_tile_where_segments_leave_slivers() -> None:
    """A step whose tensors grow a little every time, as lengths do that vary from batch to batch."""
    num_bytes = [size * MIB for size in range(30, 60)]
    events = [event for storage in range(30) for event in (storage, ~storage)]
    segments, expandable = run(events, num_bytes), run(events, num_bytes, expandable=True)
    assert segments.peak_reserved_bytes > 5 * expandable.peak_reserved_bytes
    assert expandable.peak_reserved_bytes == 60 * MIB


def test_pages_handed_back_beside_each_other_are_one_gap() -> None:
    pools = _Expandable(None)
    lengths, starts = [20 * MIB // 512] * 3, [0] * 3
    for events in ([0, 1, 2, ~0], [~1]):
        _serve(events, lengths, starts, pools)
        pools.flush()
    assert pools.gaps[starts[0]] == 40 * MIB // 512
    assert pools.reserved == 20 * MIB // 512


def test_an_empty_tensor_asks_for_nothing() -> None:
    done = run([0, 1, ~0, ~1], [0, 512])
    assert done.block_bytes.tolist() == [0, 512]
    assert done.peak_allocated_bytes == 512


def test_no_events_reserve_nothing() -> None:
    done = run([], [])
    assert (done.peak_allocated_bytes, done.peak_reserved_bytes) == (0, 0)
    assert peak_allocated(np.array([], dtype=np.int64), np.array([], dtype=np.int64)) == 0


def test_rounding_is_up_to_512_bytes() -> None:
    assert round_bytes(np.array([0, 1, 512, 513])).tolist() == [0, 512, 512, 1024]


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        (None, False),
        ("", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:128, expandable_segments:true", True),
        ("expandable_segments:True,expandable_segments:False", False),
        ("backend:cudaMallocAsync", False),
    ],
)
def test_settings_switch_expandable_segments_on(settings: str | None, answer: bool) -> None:
    assert expandable_segments_of(settings) is answer


def test_of_equal_blocks_the_one_in_the_youngest_segment_is_taken() -> None:
    """Two segments of 32 MiB, both free again: what comes next lies in the second, below the first."""
    num_bytes = np.full(3, 32 * MIB)
    done = simulate(np.array([0, 1, ~0, ~1, 2]), num_bytes)
    first, second, third = done.addresses.tolist()
    assert second < first
    assert third == second
