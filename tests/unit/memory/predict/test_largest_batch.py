"""The largest batch holds for itself, the ones above it do not, and bumps on the way are no obstacle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.errors import BadInput
from flatout.memory.predict.allocator import simulate
from flatout.memory.predict.estimate import add_workspaces
from flatout.memory.predict.largest_batch import (
    MAX_BATCH,
    NUM_NEIGHBOURS,
    _largest,
    largest_batch,
    longest,
    unbroken_batch,
)
from flatout.memory.predict.replay import fit_replay, sized
from flatout.memory.predict.samples import sample_sizes
from flatout.memory.trace.record import Trace
from tests.support.memory import TraceBuilder, layered_step

MIB = 2**20
REPLAY = fit_replay([layered_step(**s) for s in sample_sizes(dict(layered_step().sizes))])


def holds(batch_size: int, cap_bytes: int, constants: tuple[int, ...], expandable: bool) -> tuple[bool, bool]:
    """Whether a fresh trace is safe, and whether it trains."""
    log = add_workspaces(sized(layered_step(batch_size=batch_size)), constants)
    done = simulate(log.events, log.num_bytes, cap_bytes=cap_bytes, expandable_segments=expandable)
    trains = done.out_of_memory_at is None
    return trains and done.num_flushes == 0, trains


@pytest.mark.parametrize("expandable", [False, True])
@given(capacity=st.integers(30 * MIB, 500 * MIB))
def test_the_answers_hold_and_their_neighbours_do_not(expandable: bool, capacity: int) -> None:
    constants = (8 * MIB,)
    found = largest_batch(
        REPLAY,
        capacity_bytes=capacity,
        constants=constants,
        context_bytes=5 * MIB,
        expandable_segments=expandable,
    )
    safe, limit, cap_bytes = found.safe.value, found.limit.value, capacity - 5 * MIB
    assert safe <= limit
    assert safe == 0 or holds(safe, cap_bytes, constants, expandable)[0]
    assert limit == 0 or holds(limit, cap_bytes, constants, expandable)[1]
    for above in range(1, NUM_NEIGHBOURS + 1):
        assert not holds(safe + above, cap_bytes, constants, expandable)[0]
        assert not holds(limit + above, cap_bytes, constants, expandable)[1]
    assert (found.safe_reserved_bytes is None) == (safe == 0)
    assert safe == 0 or cap_bytes >= (found.safe_reserved_bytes or 0) > 0


@given(st.integers(0, 3000), st.sets(st.integers(1, 3000), max_size=3))
def test_a_bump_below_the_answer_does_not_hide_it_for_long(limit: int, bumps: set[int]) -> None:
    """What is found holds, and no size right above it does."""

    def fits(size: int) -> bool:
        return size <= limit and size not in bumps

    found = _largest(fits, low=0, max_size=4096)
    assert found == 0 or fits(found)
    assert not any(fits(found + above) for above in range(1, NUM_NEIGHBOURS + 1))


def test_a_lone_success_right_above_the_answer_is_taken() -> None:
    assert _largest(lambda size: size <= 100 or size == 103, low=0, max_size=4096) == 103
    assert _largest(lambda size: size in (2, 3), low=0, max_size=4096) == 3


def test_a_batch_that_trains_by_luck_is_not_relied_on() -> None:
    """One size in a row of failures trains: the allocator happens to cut its segments well."""

    def step_at(batch_size: int) -> Trace:
        build = TraceBuilder()
        build.mark("first", "forward")
        needs = 90 if batch_size in range(1, 91) or batch_size == 96 else 110
        build.birth(needs * MIB, "activations", "aten.mm.default")
        return build.trace(batch_size=batch_size)

    def found(lucky: bool, **options: float) -> int:
        steps = step_at if lucky else lambda size: step_at(size if size != 96 else 97)
        return unbroken_batch(steps, capacity_bytes=100 * MIB, **options)

    assert found(lucky=True) in (90, 96) and found(lucky=True, looked_below=0.1) == 90
    assert found(lucky=False) == 90


@given(st.integers(30 * MIB, 500 * MIB))
def test_an_unbroken_batch_trains_and_so_do_those_below(capacity: int) -> None:
    size = unbroken_batch(REPLAY, capacity_bytes=capacity)
    assert size <= largest_batch(REPLAY, capacity_bytes=capacity).limit.value
    assert all(holds(each, capacity, (), False)[1] for each in range(max(1, int(size * 0.97)), size + 1))


def test_every_reason_says_what_was_found() -> None:
    found = largest_batch(REPLAY, capacity_bytes=200 * MIB)
    assert found.safe.source == found.limit.source == "computed"
    assert "of 200 MiB; more samples need more" in found.safe.reason
    none = largest_batch(REPLAY, capacity_bytes=3 * MIB)
    assert (none.safe.value, none.limit.value) == (0, 0)
    assert none.limit.reason == "one sample does not fit into 3.00 MiB"
    assert none.safe_reserved_bytes is None and none.limit_flushes is None


def test_memory_handed_back_makes_room_beyond_the_safe_batch() -> None:
    """A step that holds one large block, frees it and then asks for a slightly larger one."""

    def step_at(batch_size: int) -> Trace:
        build = TraceBuilder()
        build.mark("first", "forward")
        build.death(build.birth(batch_size * 2 * MIB, "temporaries", "aten.mm.default"))
        build.death(build.birth(batch_size * 2 * MIB + 1, "temporaries", "aten.bmm.default"))
        return build.trace(batch_size=batch_size)

    found = largest_batch(step_at, capacity_bytes=400 * MIB)
    assert (found.safe.value, found.limit.value) == (99, 199)
    assert found.limit_flushes == 1
    assert "handing cached memory back once" in found.limit.reason


def test_a_search_ends_where_it_is_told_to() -> None:
    def step_at(batch_size: int) -> Trace:
        build = TraceBuilder()
        build.mark("first", "forward")
        build.birth(512, "activations", "aten.mm.default")
        return build.trace(batch_size=batch_size)

    found = largest_batch(step_at, capacity_bytes=100 * MIB, max_batch=1000)
    assert found.safe.value == found.limit.value == 1000
    assert found.safe.reason.endswith("no larger batch was asked for")


def test_other_sizes_are_given_to_the_replay() -> None:
    sizes = {"batch_size": 64, "length": 1024, "negatives": 2}
    replay = fit_replay([layered_step(**s) for s in sample_sizes(sizes, knobs=("batch_size", "length"))])
    batches = [
        largest_batch(replay, capacity_bytes=500 * MIB, sizes={"length": length}).safe.value
        for length in (128, 512)
    ]
    assert batches[0] > 3 * batches[1] > 0


def test_a_capacity_below_the_context_is_refused() -> None:
    with pytest.raises(BadInput, match=r"a capacity of 200 MiB leaves nothing beside the CUDA context"):
        largest_batch(REPLAY, capacity_bytes=200 * MIB, context_bytes=300 * MIB)


def test_the_longest_length_decides() -> None:
    assert longest({128: 1000, 512: 1, 2048: 0}) == 512
    with pytest.raises(BadInput, match="is empty"):
        longest({7: 0})


def test_a_huge_batch_is_not_tried_at_every_size_below() -> None:
    asked: list[int] = []

    def small(batch_size: int) -> Trace:
        asked.append(batch_size)
        return layered_step(batch_size=1)

    assert unbroken_batch(small, capacity_bytes=1 << 40) == MAX_BATCH
    assert len(asked) < 400
