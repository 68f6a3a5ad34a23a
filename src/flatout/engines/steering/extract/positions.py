"""Which token represents a text.

"last" is the last token, an index counts tokens from the start or, below 0, from the end, "mean" is the mean
over all tokens and a span (start, stop) the mean over a slice of them.  Contrastive answers such as "(A)"
are read at the letter: position -2.

A position counts the tokens of the text, never the columns of a batch, so padding on either side cannot move
it.
"""

from __future__ import annotations

from typing import Literal

from flatout.ground.errors import BadInput

Position = Literal["last", "mean"] | int | tuple[int, int]
HINT = "give last, mean, an index such as -2, or a span such as 3:8"


def show_position(position: Position) -> str:
    """Write a position as one word, for keys and recipes."""
    return ":".join(map(str, position)) if isinstance(position, tuple) else str(position)


def read_position(name: str) -> Position:
    """Read a position from one word: "last", "mean", "-2" or "3:8"."""
    if name in ("last", "mean"):
        return "last" if name == "last" else "mean"
    try:
        numbers = [int(part) for part in name.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        return numbers[0]
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    raise BadInput(f"{name!r} is not a position", hint=HINT)


def token_range(position: Position, *, num_tokens: int, text: str) -> tuple[int, int]:
    """Return the tokens [first, last) of a text that a position means."""
    if position == "mean":
        first, last = 0, num_tokens
    elif position == "last":
        first, last = num_tokens - 1, num_tokens
    elif isinstance(position, int):
        first = position + num_tokens if position < 0 else position
        last = first + 1
    elif isinstance(position, tuple):
        first, last = (place + num_tokens if place < 0 else place for place in position)
    else:
        raise BadInput(f"position={position!r} is unknown", hint=HINT)
    if not 0 <= first < last <= num_tokens:
        raise BadInput(
            f"position {show_position(position)} is outside a text of {num_tokens} tokens: {text[:40]!r}",
            hint=HINT,
        )
    return first, last
