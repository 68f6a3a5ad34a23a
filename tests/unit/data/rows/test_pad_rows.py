from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.rows import buffers, pad_rows
from flatout.data.rows.buffers import Buffers
from flatout.data.rows.pad_rows import PadRows, mask_of, pad_lists
from flatout.data.rows.padding import Pad
from flatout.ground.errors import BadInput

DTYPES = ["bool", "uint8", "int16", "int64", "float16", "float32", "float64"]


def reference(column: list[Any], pad: Pad) -> Any:
    """Row by row, as one would write it."""
    cut = [np.asarray(sample)[: pad.max_length] for sample in column]
    length = pad.length_of(max(map(len, cut)))
    out = np.full((len(cut), length, *cut[0].shape[1:]), pad.value, cut[0].dtype)
    for row, sample in zip(out, cut, strict=True):
        if pad.side == "right":
            row[: len(sample)] = sample
        else:
            row[length - len(sample) :] = sample
    return out


@st.composite
def columns(draw: st.DrawFn) -> list[Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    trailing = draw(st.sampled_from([(), (1,), (2,), (3, 2), (0,)]))
    counts = st.lists(st.integers(0, 12), min_size=1, max_size=6)
    equal = st.builds(lambda n, length: [length] * n, st.integers(1, 6), st.integers(0, 12))
    lengths = draw(counts | equal)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    arrays = [(random.random((n, *trailing)) * 9).astype(dtype) for n in lengths]
    if draw(st.booleans()):  # not contiguous
        arrays = [np.repeat(array, 2, axis=0)[::2] for array in arrays]
    return [torch.from_numpy(array) for array in arrays] if draw(st.booleans()) else arrays


pads = st.builds(
    Pad,
    value=st.sampled_from([0, 1]),
    side=st.sampled_from(["right", "left"]),
    multiple=st.integers(1, 5),
    max_length=st.just(7),
    truncate=st.just(True),
)


@pytest.mark.parametrize("joined_row_bytes", [0, 1 << 40])
@pytest.mark.parametrize("parallel_elements", [1, 1 << 40])
@pytest.mark.parametrize("reuse", [0, 1, None])
def test_every_way_gives_the_reference(
    joined_row_bytes: int, parallel_elements: int, reuse: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pad_rows, "JOINED_ROW_BYTES", joined_row_bytes)
    monkeypatch.setattr(pad_rows, "PARALLEL_ELEMENTS", parallel_elements)
    monkeypatch.setattr(buffers, "KEPT_BYTES", 64)
    monkeypatch.setattr(pad_rows, "KEPT_BYTES", 64 if reuse is None else 1 << 20)
    pad_column = PadRows(Buffers(pinned=False, reuse=reuse))

    @given(column=columns(), pad=pads)
    def check(column: list[Any], pad: Pad) -> None:
        values, lengths = pad_column(column, pad=pad, field="x")
        expected = reference(column, pad)
        assert values.dtype == torch.from_numpy(expected).dtype
        np.testing.assert_array_equal(values.numpy(), expected)
        assert lengths == [min(len(sample), 7) for sample in column]
        mask = mask_of(lengths, values.size(1), pad)
        assert mask.sum(1).tolist() == lengths

    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            check()
        finally:
            torch.set_num_threads(before)


def make() -> PadRows:
    return PadRows(Buffers(pinned=False, reuse=0))


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_the_dtype_asked_for(target: torch.dtype, as_tensors: bool) -> None:
    arrays: list[Any] = [np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)]
    column = [torch.from_numpy(array) for array in arrays] if as_tensors else arrays
    values, _ = make()(column, pad=Pad(value=9, dtype=target), field="x")
    assert values.dtype == target
    assert values.tolist() == [[0, 1, 2], [0, 1, 9]]


def test_mixed_dtypes_become_the_one_asked_for() -> None:
    column = [np.array([1], dtype=np.int32), np.array([2.5, 3.0], dtype=np.float32)]
    values, _ = make()(column, pad=Pad(dtype=torch.float64), field="x")
    assert values.tolist() == [[1.0, 0.0], [2.5, 3.0]]


ORDERS = [[2, 2], [2, 1]]  # rows of each sample: stacked, concatenated


@pytest.mark.parametrize("reuse", [0, 1])
@pytest.mark.parametrize("rows", ORDERS)
def test_the_batch_has_the_dtype_of_sample_0_if_that_holds_the_others(rows: list[int], reuse: int) -> None:
    wide, narrow = torch.full((rows[0],), 2**40), torch.ones(rows[1], dtype=torch.int32)
    for column in ([wide, narrow], [wide.numpy(), narrow.numpy()]):
        values, _ = PadRows(Buffers(pinned=False, reuse=reuse))(column, pad=Pad(), field="x")
        assert values.dtype == torch.int64
        assert values.tolist() == [[2**40, 2**40], [1] * rows[1] + [0] * (2 - rows[1])]
    with pytest.raises(BadInput, match=r"sample 1 has dtype torch.int64, that of sample 0 torch.int32"):
        PadRows(Buffers(pinned=False, reuse=reuse))([narrow, wide], pad=Pad(), field="x")


@pytest.mark.parametrize("rows", ORDERS)
def test_tensors_of_several_dtypes_become_the_one_asked_for(rows: list[int]) -> None:
    column = [torch.full((rows[0],), 2**24 + 1), torch.full((rows[1],), 1.5, dtype=torch.bfloat16)]
    values, _ = make()(column, pad=Pad(dtype=torch.float64), field="x")
    assert values.dtype == torch.float64 and values[0, 0] == 2**24 + 1 and values[1, 0] == 1.5


def test_unsigned_dtypes_do_not_mix() -> None:
    column = [np.zeros(2, np.uint32), np.zeros(2, np.uint16)]
    with pytest.raises(BadInput, match="sample 1 has dtype uint16, that of sample 0 uint32"):
        make()(column, pad=Pad(), field="x")
    same, _ = make()([torch.from_numpy(column[0])] * 2, pad=Pad(), field="x")
    assert same.dtype == torch.uint32 and same.shape == (2, 2)


def test_bfloat16_samples() -> None:
    column = [torch.tensor([1.5, 2.0]).bfloat16(), torch.tensor([3.0]).bfloat16()]
    for pad in (Pad(), Pad(dtype=torch.float32)):
        values, _ = make()(column, pad=pad, field="x")
        assert values.dtype == (pad.dtype or torch.bfloat16)
        assert values.tolist() == [[1.5, 2.0], [3.0, 0.0]]


def test_samples_with_gradients_are_copied_without() -> None:
    for rows in (2, 3):
        column = [torch.ones(2), torch.ones(rows, requires_grad=True)]
        values, _ = make()(column, pad=Pad(), field="x")
        assert not values.requires_grad and values.sum() == 2 + rows
        torch.nn.Parameter(torch.ones(1)).mul(values).sum().backward()  # and a model can use them


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            np.zeros((2, 5), np.float32),
            r"field 'x' of sample 2 has shape \(2, 5\), that of sample 0 \(1, 4\)",
        ),
        (np.zeros(4, np.float32), r"field 'x' of sample 2 has shape \(4,\)"),
        (np.zeros((2, 4), np.float64), "field 'x' of sample 2 has dtype float64, that of sample 0 float32"),
    ],
)
def test_the_odd_sample_is_named(odd: Any, message: str) -> None:
    column = [np.zeros((n, 4), np.float32) for n in (1, 3)] + [odd]
    with pytest.raises(BadInput, match=message):
        make()(column, pad=Pad(), field="x")


def test_a_sample_that_is_too_long_is_named() -> None:
    with pytest.raises(BadInput, match="field 'x' of sample 1 has 9 rows, max_length is 8"):
        make()([np.zeros(3), np.zeros(9)], pad=Pad(max_length=8), field="x")


def test_a_dtype_that_cannot_hold_the_samples_is_named() -> None:
    column = [np.zeros(2, np.float32)]
    with pytest.raises(BadInput, match="field 'x' of sample 0 has dtype float32"):
        make()(column, pad=Pad(dtype=torch.int64), field="x")


@given(lists=st.lists(st.lists(st.integers(-5, 5), max_size=6), min_size=1, max_size=5), pad=pads)
def test_lists_are_padded_like_arrays(lists: list[list[int]], pad: Pad) -> None:
    values, lengths = pad_lists(lists, pad=pad, field="x")
    expected = reference([np.array(each, dtype=np.int64) for each in lists], pad)
    np.testing.assert_array_equal(values.numpy(), expected)
    assert lengths == [min(7, len(each)) for each in lists]


def test_lists_of_lists_and_what_is_no_number() -> None:
    values, _ = pad_lists([[[1, 2]], [[3, 4], [5, 6]]], pad=Pad(), field="x")
    assert values.tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]
    with pytest.raises(BadInput, match="field 'x' of sample 1 holds something that is not a number"):
        pad_lists([[1], [None]], pad=Pad(), field="x")
    with pytest.raises(BadInput, match="lists of different lengths"):
        pad_lists([[[1], [1, 2]]], pad=Pad(), field="x")
