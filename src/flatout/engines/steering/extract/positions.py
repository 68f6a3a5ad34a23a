"""Which token of a text stands for it.

"last" is the last token, an index counts tokens from the start or, below 0, from the end, "mean" is the mean
over all tokens and a span (start, stop) the mean over a slice of them.  Contrastive answers such as "(A)"
are read at the letter: position -2.

A position counts the tokens of the text, never the columns of a batch, so padding on either side cannot move
it.  It is read inside the hook of a layer: what leaves the layer is [B, D], never [B, T, D].

Shapes: B rows, T columns of a batch, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flatout.engines.steering.extract.async_copy import sent
from flatout.errors import BadInput

Position = Literal["last", "mean"] | int | tuple[int, int]
HINT = 'give "last", "mean", an index, or a span as (start, stop)'


def name_of(position: Position) -> str:
    """A position as one word, for keys and recipes."""
    return ":".join(map(str, position)) if isinstance(position, tuple) else str(position)


def position_of(name: str) -> Position:
    """The position that a word names: "last", "mean", "-2", "3:8"."""
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
    raise BadInput(f"{name!r} is no position", hint="last, mean, an index such as -2, or a span such as 3:8")


def token_range(position: Position, *, num_tokens: int, text: str) -> tuple[int, int]:
    """The tokens [first, last) of a text that a position means."""
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
            f"position {name_of(position)} is outside a text of {num_tokens} tokens: {text[:40]!r}", hint=HINT
        )
    return first, last


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """What to read of each row of a batch: one column, or the mean over a run of columns."""

    row: Tensor  # B
    first: Tensor  # B
    last: Tensor  # B
    single: bool

    @classmethod
    def of(
        cls, ranges: Sequence[tuple[int, int]], *, offsets: Sequence[int], device: torch.device
    ) -> Columns:
        """Token ranges of texts whose first token stands at column `offset` of its row."""
        firsts = [first + offset for (first, _), offset in zip(ranges, offsets, strict=True)]
        lasts = [last + offset for (_, last), offset in zip(ranges, offsets, strict=True)]
        row, first, last = sent(torch.tensor([range(len(firsts)), firsts, lasts]), device)
        single = all(last - first == 1 for first, last in ranges)
        return cls(row=row, first=first, last=last, single=single)

    def read(self, hidden_BTD: Tensor) -> Tensor:
        """The wanted positions, [B, D] in the type of the layer."""
        first_B, last_B = self.first.to(hidden_BTD.device), self.last.to(hidden_BTD.device)
        if self.single:
            return hidden_BTD[self.row.to(hidden_BTD.device), first_B]
        column_T = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)
        wanted_BT = (column_T >= first_B[:, None]) & (column_T < last_B[:, None])
        # Chosen, not multiplied by 0: what padding holds may be not a number.
        kept_BTD = torch.where(wanted_BT[..., None], hidden_BTD, hidden_BTD.new_zeros(()))
        total_BD = kept_BTD.sum(
            1, dtype=torch.float32
        )  # a sum of bf16 values loses digits, of fp16 overflows
        return (total_BD / (last_B - first_B)[:, None]).to(hidden_BTD.dtype)
