from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from flatout.measure.loading.lengths import is_padded, sample_lengths, summarise

batch_lengths = st.integers(1, 16).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(1, 500), min_size=size, max_size=size), min_size=1, max_size=20
    )
)


@given(batches=batch_lengths)
def test_sorting_by_length_never_pads_more(batches: list[list[int]]) -> None:
    found = summarise(batches)
    assert found is not None
    assert 0 <= found.bucketed_share <= found.padded_share + 1e-12 < 1
    everything = [length for lengths in batches for length in lengths]
    assert (found.num_samples, found.max) == (len(everything), max(everything))
    assert found.mean == pytest.approx(sum(everything) / len(everything))


@given(length=st.integers(1, 500), size=st.integers(1, 8))
def test_equal_lengths_need_no_padding(length: int, size: int) -> None:
    found = summarise([[length] * size] * 3)
    assert found is not None
    assert found.padded_share == found.bucketed_share == 0


def test_the_padded_share_is_padding_over_all_positions() -> None:
    found = summarise([[1, 3], [4, 4]])
    assert found is not None
    assert found.padded_share == pytest.approx(2 / 14)
    assert found.bucketed_share == pytest.approx(2 / 14)
    assert summarise([[1, 4], [1, 4]]).padded_share == pytest.approx(6 / 16)  # type: ignore[union-attr]
    assert summarise([[1, 4], [1, 4]]).bucketed_share == 0  # type: ignore[union-attr]


def test_no_batches_no_lengths() -> None:
    assert summarise([]) is None


@given(lengths=st.lists(st.integers(1, 30), min_size=2, max_size=12))
def test_lengths_are_found_in_any_shape_of_sample(lengths: list[int]) -> None:
    expected = lengths if min(lengths) != max(lengths) else None
    assert sample_lengths([torch.zeros(n, 3) for n in lengths]) == expected
    assert sample_lengths([np.zeros(n) for n in lengths]) == expected
    assert sample_lengths([(torch.zeros(n), torch.tensor(1)) for n in lengths]) == expected
    assert sample_lengths([{"tokens": [0] * n, "label": 1} for n in lengths]) == expected


def test_of_several_ragged_fields_the_longest_counts() -> None:
    samples = [{"text": torch.zeros(n), "title": torch.zeros(n % 3 + 1)} for n in (7, 12, 5)]
    assert sample_lengths(samples) == [7, 12, 5]


def test_a_field_that_some_samples_lack_is_no_length() -> None:
    assert sample_lengths([{"a": torch.zeros(3)}, {"b": torch.zeros(4)}]) is None


def test_text_has_no_length() -> None:
    assert sample_lengths(["short", "much longer"]) is None


@given(lengths=st.lists(st.integers(1, 30), min_size=2, max_size=12), extra=st.integers(0, 5))
def test_padding_is_seen_in_the_batch(lengths: list[int], extra: int) -> None:
    padded = pad_sequence([torch.zeros(n + (extra if i == 0 else 0)) for i, n in enumerate(lengths)], True)
    assert is_padded({"x": padded}, lengths)
    packed = torch.zeros(sum(lengths))
    assert not is_padded({"x": packed}, lengths)
    assert not is_padded({"x": torch.zeros(len(lengths), max(lengths) - 1)}, lengths)
