from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.rows.padding import Pad, Padded
from flatout.data.rows.row_gather import DeviceRows, HostRows, Span

CPU = torch.device("cpu")
# rows of 1, 2, 4, 8, 16 bytes (moved as words), and of other widths
KINDS = [
    ("int8", ()),
    ("int8", (2,)),
    ("float32", ()),
    ("float32", (2,)),
    ("float64", (2,)),
    ("int16", (3,)),
    ("float32", (5, 2)),
]


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Span], Any, Pad]:
    dtype, trailing = draw(st.sampled_from(KINDS))
    rows = draw(st.integers(0, 20))
    flat = np.random.default_rng(rows).integers(1, 99, (rows, *trailing)).astype(dtype)
    starts = np.array(draw(st.lists(st.integers(0, rows), min_size=1, max_size=5)))
    lengths = np.array([draw(st.integers(0, rows - start)) for start in starts])
    fixed = np.arange(len(starts) * 3).reshape(-1, 3).astype(dtype)
    indices = np.array(draw(st.lists(st.integers(0, len(starts) - 1), max_size=6)), dtype=np.int64)
    pad = draw(
        st.builds(
            Pad,
            value=st.just(-1),
            side=st.sampled_from(["left", "right"]),
            multiple=st.integers(1, 4),
            lengths=st.just("n"),
            mask=st.just("mask"),
            max_length=st.sampled_from([None, 3]),
        )
    )
    return {"x": flat, "fixed": fixed}, {"x": Span(starts, lengths)}, indices, pad


def sliced(fields: Any, spans: Any) -> HostRows:
    """Host rows that take every record for a long one."""
    return HostRows(fields, spans, sliced_record_bytes=0)


def on_device(fields: Any, spans: Any) -> DeviceRows:
    return DeviceRows(fields, spans, CPU)


@pytest.mark.parametrize("make", [HostRows, sliced, on_device])
@given(problem=problems())
def test_padded_equals_record_by_record(make: Any, problem: Any) -> None:
    fields, spans, indices, pad = problem
    batch = make(fields, spans).padded(indices, ["x", "fixed"], {"x": pad})
    span = spans["x"]
    lengths = np.minimum(span.lengths[indices], pad.max_length or 99)
    length = pad.length_of(int(lengths.max(initial=0)))
    assert batch["x"].shape == (len(indices), length, *fields["x"].shape[1:])
    for row, there, index, count in zip(batch["x"], batch["mask"], indices, lengths, strict=True):
        rows = fields["x"][span.starts[index] : span.starts[index] + count]
        assert np.array_equal(row[there].numpy(), rows)
        assert (row[~there] == -1).all()
        assert there.tolist() == (sorted(there.tolist(), reverse=pad.side == "right"))
    assert batch["n"].tolist() == lengths.tolist()
    assert np.array_equal(batch["fixed"].numpy(), fields["fixed"][indices])


@pytest.mark.parametrize("make", [HostRows, sliced, on_device])
@given(problem=problems())
def test_packed_equals_record_by_record(make: Any, problem: Any) -> None:
    fields, spans, indices, _ = problem
    batch = make(fields, spans).packed(indices, ["x", "fixed"])
    span = spans["x"]
    rows = [fields["x"][span.starts[i] : span.starts[i] + span.lengths[i]] for i in indices]
    offsets = batch["x_offsets"].tolist()
    assert offsets == [0, *np.cumsum([len(each) for each in rows], dtype=int).tolist()]
    for first, last, expected in zip(offsets, offsets[1:], rows, strict=False):
        assert np.array_equal(batch["x"][first:last].numpy(), expected)
    assert len(batch["x"]) == offsets[-1]
    assert np.array_equal(batch["fixed"].numpy(), fields["fixed"][indices])


@pytest.mark.parametrize("make", [HostRows, sliced, on_device])
def test_dtype_and_extras_as_asked(make: Any) -> None:
    span = Span(np.array([0, 2]), np.array([2, 1]))
    rows = make({"x": np.array([1, 2, 3], np.int8)}, {"x": span})
    batch = rows.padded(np.array([1, 0]), ["x"], {"x": Pad(dtype=torch.float32, mask=True)})
    assert isinstance(batch["x"], Padded)
    assert batch["x"].values.dtype == torch.float32 and batch["x"].values.tolist() == [[3, 0], [1, 2]]
    assert batch["x"].mask is not None and batch["x"].mask.tolist() == [[True, False], [True, True]]
    assert batch["x"].lengths is None


def test_arrays_that_are_not_aligned_or_contiguous() -> None:
    raw = np.zeros(1 + 8 * 4, np.uint8)
    unaligned = raw[1:].view(np.float64)
    unaligned[:] = [1, 2, 3, 4]
    strided = np.arange(16.0).reshape(4, 4)[:, ::2]
    span = Span(np.array([1]), np.array([2]))
    batch = HostRows({"x": unaligned, "y": strided}, {"x": span, "y": span}).padded(
        np.array([0]), ["x", "y"], {}
    )
    assert batch["x"].tolist() == [[2, 3]]
    assert batch["y"].tolist() == [[[4, 6], [8, 10]]]
