from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.hardware.snapshot import GpuProcess, GpuSnapshot
from flatout.memory.probe.cuda_context import LIKE_BYTES, MOST_BYTES, Reading, context_of, reading_of

MIB = 2**20


def at(
    used_mib: int | None, *, reserved_mib: int = 0, own_mib: int | None = None, pids: tuple[int, ...] = ()
) -> Reading:
    return Reading(
        used_bytes=None if used_mib is None else used_mib * MIB,
        own_bytes=None if own_mib is None else own_mib * MIB,
        pids=frozenset(pids),
        reserved_bytes=reserved_mib * MIB,
    )


def test_the_drivers_figure_of_this_process_counts_whatever_others_do() -> None:
    found = context_of(at(100), [at(9000, reserved_mib=200, own_mib=720, pids=(1, 2, 3))])
    assert (found.num_bytes, found.missing) == (520 * MIB, None)


@given(
    used=st.integers(0, 10_000),
    context=st.integers(1, 2000),
    reserved=st.lists(st.integers(0, 5000), min_size=1),
)
def test_alone_it_is_the_difference(used: int, context: int, reserved: list[int]) -> None:
    readings = [at(used + context + each, reserved_mib=each) for each in reserved]
    assert context_of(at(used), readings).num_bytes == context * MIB


def test_a_context_may_grow_a_little() -> None:
    assert context_of(at(0), [at(500), at(500 + LIKE_BYTES // MIB)]).num_bytes == 564 * MIB


@pytest.mark.parametrize(
    ("before", "readings"),
    [
        (at(1000), [at(900)]),  # someone freed
        (at(0), [at(MOST_BYTES // MIB + 1)]),  # someone took, before the first reading
        (at(0), [at(500), at(16_700)]),  # and after it
        (at(400, pids=(7,)), [at(900, pids=(7, 8, 9))]),
        (at(400, pids=(7,)), [at(900, pids=(8,))]),
    ],
)
def test_where_others_moved_there_is_no_answer_but_a_reason(before: Reading, readings: list[Reading]) -> None:
    found = context_of(before, readings)
    assert found.num_bytes is None and "another process" in (found.missing or "")


@pytest.mark.parametrize(("before", "after"), [(None, 500), (0, None)])
def test_a_silent_driver_is_named(before: int | None, after: int | None) -> None:
    found = context_of(at(before), [at(after)])
    assert found.num_bytes is None and "driver does not say" in (found.missing or "")


def test_a_reading_of_a_snapshot() -> None:
    processes = tuple(
        GpuProcess(pid=pid, name=None, used_bytes=used, kind="compute")
        for pid, used in ((3, 5 * MIB), (4, None))
    )
    gpu = GpuSnapshot(index=0, name="H200", uuid=None, memory_used_bytes=9 * MIB, processes=processes)
    assert reading_of(gpu, pid=3, reserved_bytes=MIB) == at(9, reserved_mib=1, own_mib=5, pids=(3, 4))
    assert reading_of(gpu, pid=4, reserved_bytes=0) == at(9, pids=(3, 4))
    assert reading_of(None, pid=3, reserved_bytes=0) == at(None)
