"""A replay is what a fresh trace would be, byte for byte, or it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatout.ground.errors import BadInput, StructureChanges
from flatout.hardware.simulated import simulated_device
from flatout.memory.jobs.job import Recipe
from flatout.memory.predict.replay import FORMS, Replay, compare, fit_replay, with_own_sizes
from flatout.memory.predict.samples import sample_sizes
from flatout.memory.trace.record import Trace
from tests.support.memory import TraceBuilder, job_of, layered_step, traced

KNOBS = ("batch_size", "length", "negatives")
WANTED = {"batch_size": 64, "length": 1024, "negatives": 24}


def fitted(
    step: Callable[..., Trace] = layered_step, *, knobs: tuple[str, ...] = KNOBS, **wanted: int
) -> Replay:
    return fit_replay([step(**sizes) for sizes in sample_sizes({**WANTED, **wanted}, knobs=knobs)])


REPLAY = fitted()


@given(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 100))
def test_it_is_what_a_trace_at_these_sizes_is(batch_size: int, blocks: int, negatives: int) -> None:
    sizes = {"batch_size": batch_size, "length": 128 * blocks, "negatives": max(1, negatives)}
    replayed, fresh = REPLAY.at(**sizes), layered_step(**sizes)
    assert replayed.sizes == sizes
    assert replayed.num_bytes.tolist() == [storage.num_bytes for storage in fresh.storages]
    assert replayed.peak_allocated_bytes() == with_own_sizes(fresh).peak_allocated_bytes()
    REPLAY.check(fresh)


def test_every_form_is_met() -> None:
    """The similarity and the rows multiply; the joined targets add up."""
    assert {FORMS[form] for form in REPLAY.forms.tolist()} >= {"product", "sum"}


def test_a_batch_times_a_sum_is_found() -> None:
    def step(*, batch_size: int, length: int, negatives: int) -> Trace:
        build = TraceBuilder()
        build.mark("first", "forward")
        build.birth(4 * batch_size * (length + negatives), "activations", "aten.cat.default")
        return build.trace(batch_size=batch_size, length=length, negatives=negatives)

    replay = fitted(step)
    assert replay.at(batch_size=7, length=512, negatives=9).num_bytes.tolist() == [4 * 7 * 521]


def test_a_size_that_is_no_product_and_no_sum_is_refused() -> None:
    def step(*, batch_size: int, length: int, negatives: int) -> Trace:
        build = TraceBuilder()
        build.mark("first", "forward")
        num_bytes = 4 * (batch_size * length + length * negatives + negatives * batch_size)
        build.birth(num_bytes, "activations", "aten.stack.default", "mixer")
        return build.trace(batch_size=batch_size, length=length, negatives=negatives)

    with pytest.raises(
        StructureChanges, match=r"storage 0 \(aten.stack.default of mixer, forward\) are neit"
    ):
        fitted(step)


def test_one_knob_needs_three_traces() -> None:
    replay = fitted(knobs=("batch_size",), length=256, negatives=3)
    assert replay.at(batch_size=100).sizes == {"batch_size": 100, "length": 256, "negatives": 3}
    replay.check(layered_step(batch_size=777, length=256, negatives=3))
    with pytest.raises(BadInput, match=r"batch_size was traced at \[2, 3\]; a replay needs three"):
        fit_replay([layered_step(batch_size=2), layered_step(batch_size=3)])


def test_a_fourth_trace_is_checked_and_not_needed() -> None:
    batches = [layered_step(batch_size=n) for n in (5, 6, 7, 40)]
    fit_replay(batches)
    wrong = replace(batches[-1].storages[7], num_bytes=batches[-1].storages[7].num_bytes + 512)
    storages = (*batches[-1].storages[:7], wrong, *batches[-1].storages[8:])
    with pytest.raises(StructureChanges, match=r"storage 7 .* at batch_size=40 .* would follow"):
        fit_replay([*batches[:3], replace(batches[-1], storages=storages)])


def test_the_order_of_the_traces_does_not_matter() -> None:
    traces = [layered_step(**sizes) for sizes in sample_sizes(WANTED, knobs=KNOBS)]
    one, other = fit_replay(traces), fit_replay(traces[::-1])
    assert one.at(**WANTED).num_bytes.tolist() == other.at(**WANTED).num_bytes.tolist()


def test_knobs_that_never_moved_together_are_refused() -> None:
    traces = [layered_step(**sizes) for sizes in sample_sizes(WANTED, knobs=KNOBS)]
    with pytest.raises(BadInput, match="no trace moves batch_size, length, negatives at once"):
        fit_replay(traces[:-1])


def test_a_length_that_rounds_up_otherwise_is_refused() -> None:
    assert REPLAY.covers(length=512)
    assert not REPLAY.covers(length=500)
    with pytest.raises(StructureChanges, match="length=500 does not follow from the traces at batch_size=5"):
        REPLAY.at(length=500)


def test_a_short_length_is_covered_within_its_block() -> None:
    replay = fitted(length=200)
    assert [length for length in range(180, 300) if replay.covers(length=length)] == list(range(194, 225, 2))
    with pytest.raises(StructureChanges, match="length=300"):
        replay.at(length=300)


def test_a_size_that_was_not_sampled_stays() -> None:
    replay = fitted(knobs=("batch_size",))
    assert replay.covers(length=1024)
    assert not replay.covers(length=512)
    assert not replay.covers(frames=3)


def test_rounding_that_shows_is_refused() -> None:
    """A kernel that rounds the batch up to 4: three values lie on a quadratic, but one that bends down."""

    def step(*, batch_size: int) -> Trace:
        build = TraceBuilder()
        build.birth(512 * -(-batch_size // 4), "activations", "aten.odd.default")
        return build.trace(batch_size=batch_size)

    with pytest.raises(StructureChanges, match="has 512, 1024, 1024 bytes at batch_size=4, 5, 6"):
        fit_replay([step(batch_size=n) for n in (4, 5, 6)])


def test_a_structure_that_changes_is_refused() -> None:
    with pytest.raises(StructureChanges, match="is born in one of them only"):
        fit_replay([layered_step(batch_size=5), layered_step(batch_size=6), _with_sort(batch_size=7)])


def _with_sort(*, batch_size: int) -> Trace:
    trace = layered_step(batch_size=batch_size)
    extra = replace(trace.storages[-1], op="aten.sort.default")
    events = np.append(trace.events, len(trace.storages))
    return replace(trace, storages=(*trace.storages, extra), events=events)


def test_no_traces_and_foreign_traces_are_refused() -> None:
    with pytest.raises(BadInput, match="there are none"):
        fit_replay([])
    with pytest.raises(BadInput, match="not of one job"):
        fit_replay([layered_step(), replace(layered_step(), sizes={"batch_size": 3})])


def test_a_replayed_step_has_the_storages_of_a_fresh_one() -> None:
    sizes = {"batch_size": 33, "length": 384, "negatives": 5}
    replayed, fresh = REPLAY.at(**sizes), layered_step(**sizes)
    assert replayed.num_bytes.tolist() == [storage.num_bytes for storage in fresh.storages]
    assert replayed.sizes == fresh.sizes


def contrastive_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    rows = model(batch).mean(1)
    return torch.nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows), device=rows.device))


def test_a_traced_model_is_replayed_to_the_byte() -> None:
    job = job_of(
        lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        lambda batch_size, length: torch.zeros(batch_size, length, 32),
        loss=contrastive_loss,
    )
    wanted = {"batch_size": 50, "length": 512}
    samples = sample_sizes(wanted, knobs=("batch_size", "length"))
    device = simulated_device("H200")
    *traces, fresh = (
        traced(job, Recipe(precision="bf16"), device=device, **sizes) for sizes in [*samples, wanted]
    )
    replay = fit_replay(traces)
    replay.check(fresh)
    assert replay.at(**wanted).peak_allocated_bytes() == with_own_sizes(fresh).peak_allocated_bytes()
    assert (
        with_own_sizes(fresh).peak_allocated_bytes() > 1.3 * with_own_sizes(traces[0]).peak_allocated_bytes()
    )


def small(*, op: str = "aten.mm.default", deaths: tuple[int, ...] = (0, 1), extra: bool = False) -> Trace:
    build = TraceBuilder()
    build.mark("first", "forward")
    for name in (op, "aten.add.Tensor"):
        build.birth(1024, "activations", name, "encoder.0")
    for storage in deaths:
        build.death(storage)
    build.birth(1024, "temporaries", "aten.relu.default")
    if extra:
        build.birth(1024, "temporaries", "aten.sort.default", "loss")
    return build.trace(batch_size=3 if extra else 2)


def test_the_same_step_at_other_sizes_is_the_same() -> None:
    compare(layered_step(batch_size=2), layered_step(batch_size=9, length=640))


def test_the_order_of_deaths_between_two_births_is_free() -> None:
    compare(small(deaths=(0, 1)), small(deaths=(1, 0)))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (
            small(op="aten.bmm.default"),
            r"storage 0 \(aten.mm.default of encoder.0, .* is storage 0 \(aten.bmm",
        ),
        (small(deaths=(0,)), r"is freed elsewhere"),
        (small(deaths=()), r"storage . .* is freed elsewhere"),
        (small(extra=True), r"storage 3 \(aten.sort.default of loss, forward\) is born in one of them only"),
        (replace(small(), marks=((1, "first", "forward"),)), "the phases of the step begin at other events"),
    ],
)
def test_the_first_difference_is_named(other: Trace, difference: str) -> None:
    for one, two in ((small(), other), (other, small())):
        with pytest.raises(StructureChanges) as raised:
            compare(one, two)
        assert "allocates differently at batch_size=" in raised.value.message
        assert raised.value.hint == "trace it at the requested sizes"
    with pytest.raises(StructureChanges, match=difference):
        compare(small(), other)


def test_a_death_after_another_birth_is_a_difference() -> None:
    one = small()
    events = one.events.copy()
    events[[-1, -2]] = events[[-2, -1]]
    with pytest.raises(StructureChanges, match="freed elsewhere"):
        compare(one, replace(one, events=np.array(events)))
