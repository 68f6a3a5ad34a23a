from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.data import ragged
from flatout.ground.errors import BadInput

TOLERANCE = 1e-6


def loop(parts: list[list[Tensor]], pad_value: float) -> Tensor:
    """Sequences built sample by sample, as one would write it."""
    sequences = [torch.cat(rows) for rows in parts]
    longest = max(len(sequence) for sequence in sequences)
    padded = [
        torch.cat([sequence, sequence.new_full((longest - len(sequence), *sequence.shape[1:]), pad_value)])
        for sequence in sequences
    ]
    return torch.stack(padded)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Tensor], list[ragged.Piece], list[list[Tensor]], list[list[int]]]:
    """Leaf tensors, pieces of them, the rows of each sample piece by piece, and how many those are."""
    batch, item = draw(st.integers(1, 4)), draw(st.sampled_from([(), (3,), (2, 2)]))
    torch.manual_seed(draw(st.integers(0, 99)))
    leaves: list[Tensor] = []
    pieces: list[ragged.Piece] = []
    rows: list[list[Tensor]] = [[] for _ in range(batch)]
    counts: list[list[int]] = []

    def add(piece: ragged.Piece, found: list[Tensor]) -> None:
        pieces.append(piece)
        counts.append([len(part) for part in found])
        for sample, part in zip(rows, found, strict=True):
            sample.append(part)

    def leaf(*shape: int) -> Tensor:
        old = [tensor for tensor in leaves if tensor.shape == shape]
        if old and draw(st.booleans()):
            return old[0]
        leaves.append(torch.randn(*shape, dtype=torch.float64, requires_grad=True))
        return leaves[-1]

    kinds = draw(st.lists(st.sampled_from(["rows", "each", "constant"]), max_size=4))
    for kind in ["rows", *kinds]:
        where = draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
        if kind == "rows":
            values = leaf(batch, draw(st.integers(0, 5)), *item)
            start = [draw(st.integers(0, values.shape[1])) for _ in range(batch)]
            lengths = [draw(st.integers(0, values.shape[1] - first)) for first in start]
            parts = [values[b, start[b] : start[b] + lengths[b]] for b in range(batch)]
            add(ragged.rows(values, lengths, start=start), parts)
        elif kind == "each":
            values = leaf(batch, *item)
            add(ragged.each(values, where=where), [values[b : b + 1][: where[b]] for b in range(batch)])
        else:
            values = leaf(draw(st.integers(1, 3)), *item)
            add(ragged.constant(values, where=where), [values[: len(values) * w] for w in where])
    order = draw(st.permutations(range(len(pieces))))
    return (
        leaves,
        [pieces[i] for i in order],
        [[sample[i] for i in order] for sample in rows],
        [counts[i] for i in order],
    )


@given(problem=problems(), pad_value=st.sampled_from([0.0, -1.5]))
def test_values_and_gradients_equal_the_loops(problem: Any, pad_value: float) -> None:
    leaves, pieces, rows, counts = problem
    expected = loop(rows, pad_value)
    built = ragged.concat(pieces, pad_value=pad_value, piece_ids=True)
    assert torch.equal(built.values, expected)
    totals = [sum(count) for count in zip(*counts, strict=True)]
    assert built.lengths.tolist() == totals
    assert built.mask.sum(1).tolist() == totals
    assert built.piece_ids is not None
    for b, total in enumerate(totals):
        ids = [number for number, count in enumerate(counts) for _ in range(count[b])]
        assert built.piece_ids[b].tolist() == ids + [-1] * (built.values.shape[1] - total)
        for number in range(len(counts)):
            assert built.starts[number, b] == sum(count[b] for count in counts[:number])
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((built.values * weights).sum(), leaves, allow_unused=True)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=True)
    for mine, other in zip(ours, theirs, strict=True):
        other = torch.zeros(()) if other is None else other
        mine = torch.zeros(()) if mine is None else mine
        assert float((mine - other).abs().max() if mine.numel() and other.numel() else 0) <= TOLERANCE


def test_token_ids() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    built = ragged.concat(
        [ragged.constant(torch.tensor(1)), ragged.rows(ids, [3, 2]), ragged.constant(torch.tensor(2))]
    )
    assert built.values.tolist() == [[1, 5, 6, 7, 2], [1, 8, 9, 2, 0]]
    assert built.values.dtype == torch.int64


def test_lengths_in_every_form_give_the_same() -> None:
    values = torch.arange(12.0).view(2, 6)
    forms: list[Any] = [
        [2, 5],
        (2, 5),
        np.array([2, 5]),
        np.array([2, 5], np.uint8),
        torch.tensor([2, 5]),
        torch.tensor([2, 5], dtype=torch.int32),
    ]
    built = [ragged.concat([ragged.rows(values, form)]).values for form in forms]
    assert all(torch.equal(each, built[0]) for each in built)
    with pytest.raises(BadInput, match="whole numbers"):
        ragged.rows(values, [1.5, 2.0])


def test_a_fixed_length() -> None:
    values = torch.ones(2, 3, 4)
    built = ragged.concat([ragged.rows(values, [1, 3])], max_length=8)
    assert built.values.shape == (2, 8, 4) and built.values.sum() == 16
    with pytest.raises(BadInput, match="sample 1 has 3 rows, max_length is 2"):
        ragged.concat([ragged.rows(values, [1, 3])], max_length=2)


def test_lengths_that_cannot_be_read_are_bounded() -> None:
    """On the meta device nothing can be read back: the same path as on a GPU, without its values."""
    values, lengths = torch.zeros(2, 3, 4, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    built = ragged.concat([ragged.rows(values, lengths), ragged.each(values[:, 0])], max_length=5)
    assert built.values.shape == (2, 5, 4) and built.values.device.type == "meta"
    woven = ragged.interleave([ragged.rows(values, lengths), ragged.rows(values)], max_length=6)
    assert woven.values.shape == (2, 6, 4)


def test_mixed_dtypes_take_the_wider_and_give_back_their_own() -> None:
    half = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    full = torch.ones(3, requires_grad=True)
    built = ragged.concat([ragged.each(half), ragged.constant(full)])
    assert built.values.dtype == torch.float32
    built.values.sum().backward()  # type: ignore[no-untyped-call]
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
    assert full.grad is not None and full.grad.tolist() == [2, 2, 2]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
def test_it_compiles() -> None:
    values = torch.randn(3, 4, 2, requires_grad=True)
    lengths = torch.tensor([1, 4, 2])

    def build(values: Tensor) -> Tensor:
        return ragged.concat([ragged.rows(values, lengths)], max_length=4).values.square()

    compiled = torch.compile(build, backend="aot_eager", fullgraph=True)
    plain, quick = build(values), compiled(values)
    assert torch.equal(plain, quick)
    (expected,) = torch.autograd.grad(plain.sum(), values)
    (found,) = torch.autograd.grad(quick.sum(), values)
    assert torch.equal(expected, found)


@given(
    lengths=st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=1, max_size=3),
    item=st.sampled_from([(), (2,)]),
)
def test_interleaved_rows_and_gradients_equal_the_loops(
    lengths: list[list[int]], item: tuple[int, ...]
) -> None:
    streams = [torch.randn(2, 4, *item, dtype=torch.float64, requires_grad=True) for _ in lengths]
    sequences: list[list[Tensor]] = []
    ids: list[list[int]] = []
    for b in range(2):
        turns = [(t, k) for t in range(4) for k in range(len(streams)) if t < lengths[k][b]]
        sequences.append([streams[k][b, t][None] for t, k in turns] or [streams[0][b, :0]])
        ids.append([k for _, k in turns])
    expected = loop(sequences, 0.0)
    built = ragged.interleave(
        [ragged.rows(stream, count) for stream, count in zip(streams, lengths, strict=True)], piece_ids=True
    )
    assert torch.equal(built.values, expected)
    assert built.lengths.tolist() == [len(each) for each in ids]
    assert built.piece_ids is not None
    assert [row.tolist() for row in built.piece_ids] == [
        each + [-1] * (expected.shape[1] - len(each)) for each in ids
    ]
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((built.values * weights).sum(), streams)
    theirs = torch.autograd.grad((expected * weights).sum(), streams, allow_unused=True)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, torch.zeros_like(mine) if other is None else other)


def test_interleave_takes_rows_only() -> None:
    with pytest.raises(BadInput, match=r"made by ragged\.rows only"):
        ragged.interleave([ragged.rows(torch.ones(1, 1)), ragged.each(torch.ones(1))])


def test_values_without_axes_are_refused() -> None:
    with pytest.raises(BadInput, match="no batch and row axes"):
        ragged.rows(torch.ones(3))
    with pytest.raises(BadInput, match="a scalar has no batch axis"):
        ragged.each(torch.tensor(1.0))
