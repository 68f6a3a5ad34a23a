from __future__ import annotations

import pytest
import torch

from flatout.data import ragged
from flatout.data.pieces import PieceTable
from flatout.errors import BadInput

B, N, D = 3, 4, 2
VALUES = torch.zeros(B, N, D)


def test_a_tensor_read_twice_lies_in_the_table_once_if_its_rows_are_used_once() -> None:
    front, back = ragged.rows(VALUES, [1, 2, 0]), ragged.rows(VALUES, [3, 1, 4], start=[1, 2, 0])
    assert len(PieceTable([front, back]).sources) == 1
    overlapping = ragged.rows(VALUES, [3, 2, 4], start=[1, 1, 0])
    assert len(PieceTable([front, overlapping]).sources) == 2
    assert len(PieceTable([front, back], shared=False).sources) == 2


def test_shared_rows_lie_in_the_table_once_and_know_their_pieces() -> None:
    token = torch.ones(D)
    table = PieceTable([ragged.constant(token), ragged.rows(VALUES), ragged.constant(token)])
    assert [source.pieces for source in table.sources] == [[0, 2], []]
    assert table.pad_row == 1 + B * N


def test_the_base_is_where_a_piece_begins() -> None:
    table = PieceTable([ragged.each(torch.zeros(B, D)), ragged.rows(VALUES, [1, 1, 1], start=[0, 2, 3])])
    assert table.base().tolist() == [[0, 3], [1, 9], [2, 14]]
    assert table.lengths().tolist() == [[1, 1]] * 3


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
        PieceTable([ragged.rows(VALUES, lengths, start=start)]).lengths()
