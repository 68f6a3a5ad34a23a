"""Positions count tokens of the text, on whichever side its padding is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.steering.extract.positions import Columns, name_of, position_of, token_range
from flatout.errors import BadInput

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("position", "tokens"),
    [("last", (4, 5)), ("mean", (0, 5)), (0, (0, 1)), (-2, (3, 4)), ((1, 3), (1, 3)), ((-3, 5), (2, 5))],
)
def test_a_position_is_a_range_of_tokens(position: Any, tokens: tuple[int, int]) -> None:
    assert token_range(position, num_tokens=5, text="") == tokens
    assert position_of(name_of(position)) == position


@pytest.mark.parametrize("position", [5, -6, (2, 2), (3, 1), (0, 6)])
def test_a_position_outside_the_text_names_the_text(position: Any) -> None:
    with pytest.raises(BadInput, match="outside a text of 5 tokens: 'five words'"):
        token_range(position, num_tokens=5, text="five words")


def test_unknown_positions_are_refused() -> None:
    with pytest.raises(BadInput, match="'first' is unknown"):
        token_range("first", num_tokens=5, text="")  # type: ignore[arg-type]
    for name in ("first", "1:2:3", "", "a:b"):
        with pytest.raises(BadInput, match="is no position"):
            position_of(name)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), left=st.booleans(), data=st.data())
def test_what_is_read_is_the_mean_over_the_wanted_tokens(lengths: list[int], left: bool, data: Any) -> None:
    width = max(lengths)
    ranges, offsets = [], []
    for length in lengths:
        first = data.draw(st.integers(0, length - 1))
        ranges.append((first, data.draw(st.integers(first + 1, length))))
        offsets.append(width - length if left else 0)
    hidden = torch.randn(len(lengths), width, 3)
    for row, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
        hidden[row, :offset] = torch.nan
        hidden[row, offset + length :] = torch.nan
    found = Columns.of(ranges, offsets=offsets, device=CPU).read(hidden)
    expected = [
        hidden[row, offset + first : offset + last].mean(0)
        for row, ((first, last), offset) in enumerate(zip(ranges, offsets, strict=True))
    ]
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_mean_in_half_precision_neither_overflows_nor_loses_digits() -> None:
    hidden = torch.full((1, 512, 1), 1000.0, dtype=torch.float16)
    columns = Columns.of([(0, 512)], offsets=[0], device=CPU)
    assert columns.read(hidden).item() == 1000.0
    assert columns.read(hidden).dtype == torch.float16
    ones = torch.ones(1, 512, 1, dtype=torch.bfloat16)  # a running sum in bf16 stops growing at 256
    assert columns.read(ones).item() == 1.0
