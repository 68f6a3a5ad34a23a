from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.data import ragged
from flatout.data.rows.pieces import PieceTable, gather_rows
from flatout.ground.errors import BadInput

B, N, D = 3, 4, 2
VALUES = torch.zeros(B, N, D)


def test_a_tensor_read_twice_lies_in_the_table_once_if_its_rows_are_used_once() -> None:
    front, back = ragged.rows(VALUES, [1, 2, 0]), ragged.rows(VALUES, [3, 1, 4], start=[1, 2, 0])
    assert len(PieceTable([front, back]).sources()) == 1
    overlapping = ragged.rows(VALUES, [3, 2, 4], start=[1, 1, 0])
    assert len(PieceTable([front, overlapping]).sources()) == 2
    once = ragged.each(VALUES[:, 0])
    assert len(PieceTable([once, once]).sources()) == 2


def test_lengths_that_cannot_be_read_share_rows_where_one_piece_starts_at_the_others_end() -> None:
    values, lengths = VALUES.to("meta"), torch.zeros(B, dtype=torch.int64, device="meta")
    front = ragged.rows(values, lengths)
    assert len(PieceTable([front, ragged.rows(values, lengths, start=lengths)]).sources()) == 1
    assert len(PieceTable([front, ragged.rows(values, lengths)]).sources()) == 2
    assert len(PieceTable([front, ragged.rows(values, lengths, start=lengths + 1)]).sources()) == 2


def test_shared_rows_lie_in_the_table_once_per_sample_and_last() -> None:
    token, pair = torch.ones(D), torch.ones(2, D)
    table = PieceTable([ragged.constant(token), ragged.rows(VALUES), ragged.constant(pair)])
    assert [len(source) for source in table.sources()] == [B * N, B, 2 * B]
    assert table.first_row == [B * N, 0, B * N + B]
    assert table.pad_row == B * N + B + 2 * B


@given(
    lengths=st.lists(st.integers(0, N), min_size=B, max_size=B),
    where=st.lists(st.booleans(), min_size=B, max_size=B),
    extra=st.integers(0, 3),
)
def test_lengths_on_a_device_give_the_places_of_those_on_the_host(
    lengths: list[int], where: list[bool], extra: int
) -> None:
    token = torch.ones(2, D)
    pieces = [
        ragged.constant(token, where=where),
        ragged.rows(VALUES, lengths),
        ragged.rows(VALUES, start=lengths),
        ragged.each(torch.zeros(B, D), where=where),
    ]
    on_device = [
        dataclasses.replace(
            piece,
            **{
                name: torch.from_numpy(value)
                for name, value in (("lengths", piece.lengths), ("start", piece.start))
                if isinstance(value, np.ndarray)
            },
        )
        for piece in pieces
    ]
    here, there = PieceTable(pieces), PieceTable(on_device)
    assert here.on_host and not there.on_host
    for max_length in (None, 7 + extra):
        expected, found = here.place(max_length), there.place(max_length)
        assert found.length == expected.length
        assert torch.equal(found.starts, expected.starts) and torch.equal(found.lengths, expected.lengths)
        expected_rows = torch.cat([*here.sources(), torch.zeros(1, D)])[expected.rows]
        assert torch.equal(torch.cat([*there.sources(), torch.zeros(1, D)])[found.rows], expected_rows)


def test_places_on_a_device_are_cut_to_what_is_there() -> None:
    piece = dataclasses.replace(ragged.rows(VALUES), lengths=torch.tensor([9, 2, -1]))
    placed = PieceTable([piece]).place(3)
    assert placed.lengths.tolist() == [3, 2, 0]
    assert placed.rows.view(B, 3).tolist() == [[0, 1, 2], [4, 5, 12], [12, 12, 12]]


def test_places_on_the_host() -> None:
    table = PieceTable([ragged.each(torch.zeros(B, D)), ragged.rows(VALUES, [1, 0, 2], start=[0, 2, 1])])
    placed = table.place(None)
    pad = table.pad_row
    assert placed.length == 3 and placed.lengths.tolist() == [2, 1, 3]
    assert placed.rows.view(B, 3).tolist() == [[12, 0, pad], [13, pad, pad], [14, 9, 10]]
    assert placed.starts.tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([ragged.constant(torch.ones(D))], "no piece has a batch axis"),
        ([ragged.rows(VALUES), ragged.each(torch.zeros(B, D + 1))], r"piece 1 \(each\) has shape \(3, 3\)"),
        ([ragged.rows(VALUES), ragged.constant(torch.zeros(1, 1, 1, D))], r"piece 1 \(constant\)"),
        ([ragged.rows(VALUES), ragged.each(torch.zeros(B + 1, D))], "piece 1 has 4 samples"),
        ([ragged.rows(VALUES, [1, 2])], r"piece 0: lengths has shape \(2,\), expected \(3,\)"),
    ],
)
def test_pieces_that_do_not_fit_are_named(pieces: list[ragged.Piece], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        PieceTable(pieces)


@pytest.mark.parametrize(
    ("lengths", "start"),
    [([1, 5, 0], None), ([1, -1, 0], None), ([1, 3, 0], [0, 2, 0]), ([1, 1, 1], [0, -1, 0])],
)
def test_rows_that_are_not_there_are_named(lengths: list[int], start: list[int] | None) -> None:
    with pytest.raises(BadInput, match="piece 0 of sample 1 asks for"):
        PieceTable([ragged.rows(VALUES, lengths, start=start)])


INDEX = torch.tensor([0, 1, 5, 5, 3, 4])  # the padding twice, row 2 not at all


def test_rows_and_padding() -> None:
    sources = [torch.tensor([10.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])]
    assert gather_rows(sources, INDEX, pad_value=-1).tolist() == [10, 1, -1, -1, 3, 4]


def test_the_gradient_is_the_rows_copied_back() -> None:
    one, four = torch.randn(1, 2, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    weights = torch.arange(1.0, 13.0).view(6, 2)
    (gather_rows([one, four], INDEX, pad_value=0) * weights).sum().backward()
    assert one.grad is not None and four.grad is not None
    assert one.grad.tolist() == weights[:1].tolist()
    assert four.grad.tolist() == [weights[1].tolist(), [0, 0], weights[4].tolist(), weights[5].tolist()]


def test_only_wanted_gradients_are_made() -> None:
    one, four = torch.ones(1, 2, requires_grad=True), torch.ones(4, 2)
    gather_rows([one, four], INDEX, pad_value=0).sum().backward()
    assert one.grad is not None and four.grad is None
    with torch.no_grad():
        assert not gather_rows([one, four], INDEX, pad_value=0).requires_grad


@given(shared_first=st.booleans(), seed=st.integers(0, 99))
def test_expanded_rows_sum_their_gradient(shared_first: bool, seed: int) -> None:
    torch.manual_seed(seed)
    shared = torch.randn(1, 2, dtype=torch.float64, requires_grad=True)
    own = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    sources = [shared.expand(3, 2), own] if shared_first else [own, shared.expand(3, 2)]
    index = torch.randperm(7)
    expected = torch.cat([*sources, torch.full((1, 2), 5.0, dtype=torch.float64)])[index]
    found = gather_rows(sources, index, pad_value=5)
    assert torch.equal(found, expected)
    weights = torch.randn_like(found)
    ours = torch.autograd.grad((found * weights).sum(), [shared, own])
    theirs = torch.autograd.grad((expected * weights).sum(), [shared, own])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
