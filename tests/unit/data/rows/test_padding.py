from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.rows.padding import MAX_KEPT_VIEWS, Pad, PaddingRows, numpy_dtype, torch_dtype
from flatout.ground.errors import BadInput


def test_every_wrong_setting_is_named_at_once() -> None:
    with pytest.raises(BadInput) as caught:
        Pad(side="up", multiple=0, max_length=0, truncate=True)  # type: ignore[arg-type]
    for part in ("side='up'", "multiple=0", "max_length=0"):
        assert part in str(caught.value)
    with pytest.raises(BadInput, match="truncate=True needs max_length"):
        Pad(truncate=True)
    with pytest.raises(BadInput, match="name both or neither"):
        Pad(lengths="n", mask=True)


@given(longest=st.integers(0, 100), multiple=st.integers(1, 16), limit=st.integers(1, 100))
def test_a_batch_holds_its_longest_sample(longest: int, multiple: int, limit: int) -> None:
    length = Pad(multiple=multiple).length_of(longest)
    assert length % multiple == 0 and longest <= length < longest + multiple
    assert Pad(multiple=multiple, max_length=limit).length_of(min(longest, limit)) <= limit
    assert Pad(multiple=limit, max_length=limit).length_of(max(1, min(longest, limit))) == limit


@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=5),
    form=st.sampled_from(["array", "tensor", "bytes"]),
    trailing=st.sampled_from([(), (2,), (3, 2)]),
)
def test_padding_fills_up_to_the_length(lengths: list[int], form: str, trailing: tuple[int, ...]) -> None:
    rows = PaddingRows(7, trailing, torch.int16, form=form, field="x")
    for length in (max(lengths), 100):
        for count, piece in zip(lengths, rows.beside(lengths, length), strict=True):
            values = np.frombuffer(piece, dtype=np.int16) if form == "bytes" else np.asarray(piece).ravel()
            assert len(values) == (length - count) * int(np.prod(trailing))
            assert (values == 7).all()


def test_long_padding_is_cut_when_needed() -> None:
    rows = PaddingRows(0, (), torch.int8, form="array", field="x")
    (piece,) = rows.beside([1], MAX_KEPT_VIEWS + 2)
    assert piece.shape == (MAX_KEPT_VIEWS + 1,)


@pytest.mark.parametrize(
    ("value", "dtype"), [(-1, torch.uint8), (300, torch.uint8), (0.5, torch.int64), (2, torch.bool)]
)
def test_a_value_that_does_not_fit_names_the_field(value: float, dtype: torch.dtype) -> None:
    with pytest.raises(BadInput, match=f"field 'tokens': the pad value {value}"):
        PaddingRows(value, (), dtype, form="array", field="tokens")


def test_infinite_padding_fits_floats() -> None:
    rows = PaddingRows(float("-inf"), (), torch.float32, form="tensor", field="x")
    assert torch.isneginf(rows.beside([0], 3)[0]).all()


@pytest.mark.parametrize(
    "name", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
)
def test_there_and_back(name: str) -> None:
    dtype = torch_dtype(np.dtype(name), "x")
    assert str(dtype) == f"torch.{name}"
    assert numpy_dtype(dtype, "x") == np.dtype(name)


def test_a_dtype_without_counterpart_names_the_field() -> None:
    with pytest.raises(BadInput, match="field 'words'"):
        torch_dtype(np.dtype("U3"), "words")
    with pytest.raises(BadInput, match="field 'half'"):
        numpy_dtype(torch.bfloat16, "half")
