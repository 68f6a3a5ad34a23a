"""Positions count tokens of the text, on whichever side its padding is."""

from __future__ import annotations

from typing import Any

import pytest

from flatout.engines.steering.extract.positions import read_position, show_position, token_range
from flatout.ground.errors import BadInput


@pytest.mark.parametrize(
    ("position", "tokens"),
    [("last", (4, 5)), ("mean", (0, 5)), (0, (0, 1)), (-2, (3, 4)), ((1, 3), (1, 3)), ((-3, 5), (2, 5))],
)
def test_a_position_is_a_range_of_tokens(position: Any, tokens: tuple[int, int]) -> None:
    assert token_range(position, num_tokens=5, text="") == tokens
    assert read_position(show_position(position)) == position


@pytest.mark.parametrize("position", [5, -6, (2, 2), (3, 1), (0, 6)])
def test_a_position_outside_the_text_names_the_text(position: Any) -> None:
    with pytest.raises(BadInput, match="outside a text of 5 tokens: 'five words'"):
        token_range(position, num_tokens=5, text="five words")


def test_unknown_positions_are_refused() -> None:
    with pytest.raises(BadInput, match="'first' is unknown"):
        token_range("first", num_tokens=5, text="")  # type: ignore[arg-type]
    for name in ("first", "1:2:3", "", "a:b"):
        with pytest.raises(BadInput, match="is not a position"):
            read_position(name)
