"""The largest batch holds for itself, the ones above it do not, and bumps on the way are no obstacle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput
from flatout.memory.predict.allocator import simulate
from flatout.memory.predict.largest_batch import (
    MAX_BATCH,
    NUM_NEIGHBOURS,
    CapSearch,
    largest_that,
    longest,
)
from flatout.memory.predict.replay import SizedTrace, fit_replay, with_own_sizes
from flatout.memory.predict.samples import sample_sizes
from tests.support.memory import TraceBuilder, layered_step

MIB = 2**20
REPLAY = fit_replay([layered_step(**s) for s in sample_sizes(dict(layered_step().sizes))])


def replayed(batch_size: int) -> SizedTrace:
    return REPLAY.at(batch_size=batch_size)


def holds(batch_size: int, cap_bytes: int, *, expandable: bool = False) -> tuple[bool, bool]:
    """Whether a fresh trace is safe, and whether it trains."""
    step = with_own_sizes(layered_step(batch_size=batch_size))
    done = simulate(step.trace.events, step.num_bytes, cap_bytes=cap_bytes, expandable_segments=expandable)
    trains = done.out_of_memory_at is None
    return trains and done.num_flushes == 0, trains


@pytest.mark.parametrize("expandable", [False, True])
@given(cap_bytes=st.integers(25 * MIB, 500 * MIB))
def test_the_answers_hold_and_their_neighbours_do_not(expandable: bool, cap_bytes: int) -> None:
    search = CapSearch(replayed, cap_bytes=cap_bytes, expandable_segments=expandable)
    safe, limit = search.safe_batch(), search.limit_batch()
    assert safe <= limit
    assert safe == 0 or holds(safe, cap_bytes, expandable=expandable)[0]
    assert limit == 0 or holds(limit, cap_bytes, expandable=expandable)[1]
    for above in range(1, NUM_NEIGHBOURS + 1):
        assert not holds(safe + above, cap_bytes, expandable=expandable)[0]
        assert not holds(limit + above, cap_bytes, expandable=expandable)[1]


@given(st.integers(0, 3000), st.sets(st.integers(1, 3000), max_size=3))
def test_a_bump_below_the_answer_does_not_hide_it_for_long(limit: int, bumps: set[int]) -> None:
    """What is found holds, and no size right above it does."""

    def fits(size: int) -> bool:
        return size <= limit and size not in bumps

    found = largest_that(fits, max_size=4096)
    assert found == 0 or fits(found)
    assert not any(fits(found + above) for above in range(1, NUM_NEIGHBOURS + 1))


def test_a_lone_success_right_above_the_answer_is_taken() -> None:
    assert largest_that(lambda size: size <= 100 or size == 103, max_size=4096) == 103
    assert largest_that(lambda size: size in (2, 3), max_size=4096) == 3


def test_a_batch_that_trains_by_luck_is_not_relied_on() -> None:
    """One size in a row of failures trains: the allocator happens to cut its segments well."""

    def step_at(batch_size: int) -> SizedTrace:
        build = TraceBuilder()
        build.mark("first", "forward")
        needs = 90 if batch_size in range(1, 91) or batch_size == 96 else 110
        build.birth(needs * MIB, "activations", "aten.mm.default")
        return with_own_sizes(build.trace(batch_size=batch_size))

    def found(lucky: bool, **options: float) -> int:
        steps = step_at if lucky else lambda size: step_at(size if size != 96 else 97)
        return CapSearch(steps, cap_bytes=100 * MIB).unbroken_batch(**options)

    assert found(lucky=True) in (90, 96) and found(lucky=True, looked_below=0.1) == 90
    assert found(lucky=False) == 90


@given(st.integers(30 * MIB, 500 * MIB))
def test_an_unbroken_batch_trains_and_so_do_those_below(capacity: int) -> None:
    search = CapSearch(replayed, cap_bytes=capacity)
    size = search.unbroken_batch()
    assert size <= search.limit_batch()
    assert all(holds(each, capacity)[1] for each in range(max(1, int(size * 0.97)), size + 1))


def test_nothing_fits_where_one_sample_does_not() -> None:
    search = CapSearch(replayed, cap_bytes=3 * MIB)
    assert (search.safe_batch(), search.limit_batch(), search.unbroken_batch()) == (0, 0, 0)


def test_memory_handed_back_makes_room_beyond_the_safe_batch() -> None:
    """A step that holds one large block, frees it and then asks for a slightly larger one."""

    def step_at(batch_size: int) -> SizedTrace:
        build = TraceBuilder()
        build.mark("first", "forward")
        build.death(build.birth(batch_size * 2 * MIB, "temporaries", "aten.mm.default"))
        build.death(build.birth(batch_size * 2 * MIB + 1, "temporaries", "aten.bmm.default"))
        return with_own_sizes(build.trace(batch_size=batch_size))

    search = CapSearch(step_at, cap_bytes=400 * MIB)
    assert (search.safe_batch(), search.limit_batch()) == (99, 199)
    assert search.trains(199) and not search.is_safe(199)


def test_a_search_ends_where_it_is_told_to() -> None:
    def step_at(batch_size: int) -> SizedTrace:
        build = TraceBuilder()
        build.mark("first", "forward")
        build.birth(512, "activations", "aten.mm.default")
        return with_own_sizes(build.trace(batch_size=batch_size))

    search = CapSearch(step_at, cap_bytes=100 * MIB, max_batch=1000)
    assert search.safe_batch() == search.limit_batch() == 1000


def test_a_longer_sequence_leaves_room_for_fewer() -> None:
    sizes = {"batch_size": 64, "length": 1024, "negatives": 2}
    replay = fit_replay([layered_step(**s) for s in sample_sizes(sizes, knobs=("batch_size", "length"))])

    def largest(length: int) -> int:
        search = CapSearch(lambda size: replay.at(batch_size=size, length=length), cap_bytes=500 * MIB)
        return search.safe_batch()

    assert largest(128) > 3 * largest(512) > 0


def test_the_longest_length_decides() -> None:
    assert longest({128: 1000, 512: 1, 2048: 0}) == 512
    with pytest.raises(BadInput, match="is empty"):
        longest({7: 0})


def test_a_huge_batch_is_not_tried_at_every_size_below() -> None:
    asked: list[int] = []

    def small(batch_size: int) -> SizedTrace:
        asked.append(batch_size)
        return with_own_sizes(layered_step(batch_size=1))

    assert CapSearch(small, cap_bytes=1 << 40).unbroken_batch() == MAX_BATCH
    assert len(asked) < 400
