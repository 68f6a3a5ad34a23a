"""Blocks, and what a pack of them tells attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.adapters.lora.token_blocks import TokenBlock, block_of, frame, layout, rows_of, shapes_of
from flatout.ground.errors import BadInput

LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4)


def made(
    lengths: list[list[int]], *, row_multiple: int = 1, length_multiple: int = 1
) -> tuple[TokenBlock, ...]:
    return tuple(
        block_of(
            [np.arange(length) + 10 for length in rows],
            adapter=adapter,
            pad_id=0,
            row_multiple=row_multiple,
            length_multiple=length_multiple,
        )
        for adapter, rows in enumerate(lengths)
    )


@given(LENGTHS, st.integers(1, 4), st.integers(1, 8))
def test_a_block_holds_its_examples_and_fills_up_to_the_multiples(
    lengths: list[list[int]], row_multiple: int, length_multiple: int
) -> None:
    blocks = made(lengths, row_multiple=row_multiple, length_multiple=length_multiple)
    for block, rows in zip(blocks, lengths, strict=True):
        assert block.num_rows % row_multiple == 0 and block.num_rows - len(rows) < row_multiple
        assert block.length % length_multiple == 0 and block.length - max(rows) < length_multiple
        assert block.lengths.tolist() == rows + [1] * (block.num_rows - len(rows))
        assert block.mask().sum(1).tolist() == block.lengths.tolist()
        for row, length in enumerate(rows):
            assert block.ids[row].tolist() == [*range(10, 10 + length)] + [0] * (block.length - length)


@given(LENGTHS)
def test_every_token_is_in_one_sequence_and_none_crosses_a_row(lengths: list[list[int]]) -> None:
    blocks = made(lengths)
    chosen = layout(blocks)
    bounds = chosen.cumulative().tolist()
    assert bounds[0] == 0 and bounds[-1] == chosen.frame.num_tokens and bounds == sorted(bounds)
    rows = [length for block in lengths for length in block]
    assert len(bounds) == 2 * len(rows) + 1
    assert [stop - start for start, stop in zip(bounds[::2], bounds[1::2], strict=False)] == rows
    assert bounds[:-1:2] == chosen.frame.starts.tolist()


@given(LENGTHS)
def test_runs_and_their_masks_cover_all_blocks(lengths: list[list[int]]) -> None:
    blocks = made(lengths)
    chosen = layout(blocks)
    row = 0
    for run, mask in zip(chosen.frame.runs, chosen.key_masks(), strict=True):
        own = chosen.lengths[row : row + run.num_rows]
        row += run.num_rows
        assert (mask is None) == bool(own.eq(run.length).all())
        if mask is not None:
            assert mask.shape == (run.num_rows, 1, 1, run.length) and mask.sum((1, 2, 3)).equal(own)
    assert row == len(chosen.lengths)
    assert [run.start for run in chosen.frame.runs[1:]] == [run.stop for run in chosen.frame.runs[:-1]]
    neighbours = zip(chosen.frame.runs, chosen.frame.runs[1:], strict=False)
    assert all(a.length != b.length for a, b in neighbours)


def test_positions_begin_anew_in_every_row() -> None:
    blocks = made([[3, 2], [4]])
    assert layout(blocks).frame.positions.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 2, 3]]


def test_rows_come_back_as_blocks() -> None:
    shapes = shapes_of(made([[3, 2], [4]]))
    first, second = rows_of(torch.arange(20.0).view(10, 2), shapes)
    assert first.shape == (2, 3, 2) and second.shape == (1, 4, 2)
    assert second[0, 0].tolist() == [12.0, 13.0]


def test_a_known_frame_is_taken_as_it_is() -> None:
    blocks = made([[3, 2]])
    known = frame(shapes_of(blocks), device="cpu")
    assert layout(blocks, known=known).frame is known


def test_types_are_padded_like_tokens() -> None:
    block = block_of(
        [np.arange(3), np.arange(2)], adapter=0, pad_id=9, types=[np.ones(3), None], length_multiple=4
    )
    assert block.types is not None
    assert block.types.tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    assert block.to("cpu").types is not None
    assert block_of([np.arange(3)], adapter=0, pad_id=9, types=[None]).types is None


@pytest.mark.parametrize("examples", [[], [np.arange(0)]])
def test_rows_without_tokens_are_refused(examples: list[np.ndarray]) -> None:
    with pytest.raises(BadInput, match="at least one token"):
        block_of(examples, adapter=0, pad_id=0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(BadInput, match=r"lengths \(3,\)"):
        TokenBlock(adapter=0, ids=ids, lengths=torch.ones(3, dtype=torch.int64))
    with pytest.raises(BadInput, match="one type for each token"):
        TokenBlock(adapter=0, ids=ids, lengths=torch.ones(2, dtype=torch.int64), types=ids[:1])
    with pytest.raises(BadInput, match="at least one"):
        layout(())
