from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput
from flatout.memory.predict.estimate import MemoryEstimate, estimate
from flatout.memory.probe.probe_results import ProbedBatch, ProbeResult, correct
from tests.support.memory import layered_step

MIB = 2**20
OTHERS = {"length": 16, "negatives": 1}


def estimated(batch_size: int) -> MemoryEstimate:
    return estimate(layered_step(batch_size=batch_size, **OTHERS), context_bytes=100 * MIB)


def result(*probes: ProbedBatch, context_bytes: int | None = 500 * MIB) -> ProbeResult:
    like = estimated(1)
    return ProbeResult(
        device="NVIDIA H200",
        torch_version="2.13.0",
        other_sizes=OTHERS,
        num_parameters=like.num_parameters,
        num_trainable=like.num_trainable,
        context_bytes=context_bytes,
        probes=probes,
    )


def probed(batch_size: int, *, missed_bytes: int) -> ProbedBatch:
    """What a run measures that takes this much more than its estimate."""
    found = estimated(batch_size)
    return ProbedBatch(
        batch_size=batch_size,
        num_steps=3,
        peak_allocated_bytes=found.peak_allocated_bytes + missed_bytes,
        peak_reserved_bytes=found.peak_reserved_bytes + 2 * missed_bytes,
        micro_batch_s=0.0123456789,
    )


def test_probes_are_one_or_two_at_different_batches() -> None:
    with pytest.raises(BadInput, match="one or two"):
        result()
    with pytest.raises(BadInput, match="same batch size"):
        result(probed(2, missed_bytes=0), probed(2, missed_bytes=1))


# Correction


def test_what_one_probe_missed_is_added_as_a_constant() -> None:
    found = estimated(16)
    better = correct(found, result(probed(2, missed_bytes=3 * MIB)), at_probes=[estimated(2)])
    assert better.peak_allocated_bytes == found.peak_allocated_bytes + 3 * MIB
    assert better.peak_reserved_bytes == found.peak_reserved_bytes + 6 * MIB
    assert better.context_bytes == 500 * MIB
    assert better.process_bytes == better.peak_reserved_bytes + 500 * MIB
    assert better.workspaces.source == "measured" and better.workspaces.value == (3 * MIB,)
    assert sum(better.by_component.values()) == better.peak_allocated_bytes


@given(
    misses=st.tuples(*[st.integers(0, 4 * MIB)] * 2), batch_size=st.integers(12, 40), swapped=st.booleans()
)
def test_what_both_probes_missed_is_added(misses: tuple[int, int], batch_size: int, swapped: bool) -> None:
    probes = [probed(batch, missed_bytes=missed) for batch, missed in zip((2, 4), misses, strict=True)]
    there = [estimated(4), estimated(2)] if swapped else [estimated(2), estimated(4)]
    found = estimated(batch_size)
    better = correct(found, result(*probes), at_probes=there)
    assert better.peak_allocated_bytes == max(
        found.peak_allocated_bytes + min(misses), *(probe.peak_allocated_bytes for probe in probes)
    )
    assert better.peak_reserved_bytes == max(
        found.peak_reserved_bytes + 2 * min(misses), *(probe.peak_reserved_bytes for probe in probes)
    )


@given(missed=st.integers(-(2**24), 0), other=st.integers(-(2**24), 2**24))
def test_a_probe_that_held_less_takes_nothing_away(missed: int, other: int) -> None:
    found = estimated(32)
    probes = [probed(2, missed_bytes=missed), probed(4, missed_bytes=other)]
    better = correct(found, result(*probes), at_probes=[estimated(2), estimated(4)])
    assert better.peak_allocated_bytes == max(
        found.peak_allocated_bytes, *(probe.peak_allocated_bytes for probe in probes)
    )


@given(misses=st.tuples(*[st.integers(-(2**24), 2**24)] * 2), batch_size=st.integers(1, 40))
def test_a_correction_is_never_below_what_was_measured(misses: tuple[int, int], batch_size: int) -> None:
    probes = [probed(batch, missed_bytes=missed) for batch, missed in zip((2, 4), misses, strict=True)]
    better = correct(estimated(batch_size), result(*probes), at_probes=[estimated(2), estimated(4)])
    for probe in probes:
        if probe.batch_size <= batch_size:
            assert better.peak_allocated_bytes >= probe.peak_allocated_bytes
            assert better.peak_reserved_bytes >= probe.peak_reserved_bytes
    assert better.peak_reserved_bytes >= better.peak_allocated_bytes >= 0


def test_at_a_probed_batch_the_correction_is_what_was_measured() -> None:
    probes = [probed(2, missed_bytes=MIB), probed(4, missed_bytes=7 * MIB)]
    for probe in probes:
        better = correct(estimated(probe.batch_size), result(*probes), at_probes=[estimated(2), estimated(4)])
        assert better.peak_allocated_bytes == probe.peak_allocated_bytes
        assert better.peak_reserved_bytes == probe.peak_reserved_bytes


def test_an_unknown_context_leaves_the_estimates() -> None:
    made = result(probed(2, missed_bytes=0), context_bytes=None)
    assert made.context is None
    better = correct(estimated(4), made, at_probes=[estimated(2)])
    assert better.context_bytes == 100 * MIB
    known = result(probed(2, missed_bytes=0)).context
    assert known is not None and known.value == 500 * MIB and known.source == "measured"


def test_what_does_not_fit_the_probe_is_refused() -> None:
    made = result(probed(2, missed_bytes=0))
    with pytest.raises(BadInput, match="the estimates at them"):
        correct(estimated(8), made, at_probes=[estimated(3)])
    longer = estimate(layered_step(batch_size=8, length=32, negatives=1))
    with pytest.raises(BadInput, match="probe at these sizes"):
        correct(longer, made, at_probes=[estimated(2)])
    other = dataclasses.replace(estimated(8), num_parameters=1)
    with pytest.raises(BadInput, match="probe this model"):
        correct(other, made, at_probes=[estimated(2)])
