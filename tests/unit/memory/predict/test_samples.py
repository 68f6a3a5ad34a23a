"""Which sizes are traced: small, apart from each other, and such that rounding does not show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput
from flatout.memory.predict.samples import PERIODS, block_of, sample_sizes

PERIOD = PERIODS["length"]


def test_three_batches_are_enough_for_the_batch() -> None:
    samples = sample_sizes({"batch_size": 64, "length": 512})
    assert [sample["batch_size"] for sample in samples] == [5, 6, 7]
    assert {sample["length"] for sample in samples} == {512}


def test_each_knob_moves_alone_and_then_all_at_once() -> None:
    knobs = ("batch_size", "length", "negatives")
    samples = sample_sizes({"batch_size": 45, "length": 512, "negatives": 24, "positives": 1}, knobs=knobs)
    base, *others = samples
    moved = [{name for name in base if sample[name] != base[name]} for sample in others]
    assert moved[:-1] == [{name} for name in knobs for _ in range(2)]
    assert moved[-1] == set(knobs)
    assert {sample["positives"] for sample in samples} == {1}


def test_a_length_is_sampled_in_multiples_of_128_below_the_wanted_one() -> None:
    samples = sample_sizes({"batch_size": 8, "length": 2048}, knobs=("length",))
    assert [sample["length"] for sample in samples] == [128, 256, 384]


@given(st.integers(1, 5000))
def test_lengths_round_up_alike_and_stay_within_what_the_model_takes(wanted: int) -> None:
    samples = sample_sizes({"batch_size": 8, "length": wanted}, knobs=("length",))
    first, second, third = (sample["length"] for sample in samples)
    assert 1 <= first < second < third
    assert third - second == second - first
    assert third <= wanted or wanted % block_of(PERIOD) in (1, 2)  # no three lengths round up as those do
    same_rest = (second - first) % PERIOD == 0 and first % PERIOD == wanted % PERIOD
    same_block = len({(n - 1) // block_of(PERIOD) for n in (first, second, third, wanted)}) == 1
    assert same_rest or same_block


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_no_two_sizes_share_a_value(batch_size: int, negatives: int, positives: int) -> None:
    sizes = {"batch_size": batch_size, "negatives": negatives, "positives": positives}
    samples = sample_sizes(sizes, knobs=("batch_size", "negatives"))
    taken = [{sample[name] for sample in samples} for name in sizes]
    assert len(set.union(*taken)) == sum(len(values) for values in taken)


def test_larger_batches_can_be_asked_for() -> None:
    samples = sample_sizes({"batch_size": 64}, smallest_batch=32)
    assert [sample["batch_size"] for sample in samples] == [32, 33, 34]


def test_a_knob_that_the_job_does_not_have_is_refused() -> None:
    with pytest.raises(BadInput, match="frames is not one of the job's sizes: batch_size"):
        sample_sizes({"batch_size": 8}, knobs=("batch_size", "frames"))
