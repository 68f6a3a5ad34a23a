"""How one ragged field is padded, and what a padded field may come with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flatout.errors import BadInput


class Padded(NamedTuple):
    """A padded field with what was asked for beside it."""

    values: Tensor
    lengths: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pad:
    """How one field is padded.

    `lengths` and `mask` are made on demand: a name puts them beside the field in its dict, True makes
    the field itself a `Padded(values, lengths, mask)`.  A batch is as long as its longest sample, rounded
    up to `multiple`; `multiple=max_length` gives every batch the same shape.
    """

    value: float = 0
    side: Literal["right", "left"] = "right"
    dtype: torch.dtype | None = None  # None: the dtype of the samples
    multiple: int = 1
    max_length: int | None = None  # a longer sample is an error, or cut with `truncate`
    truncate: bool = False  # keep the first `max_length` rows
    lengths: str | bool = False
    mask: str | bool = False

    def __post_init__(self) -> None:
        wrong = []
        if self.side not in ("right", "left"):
            wrong.append(f"side={self.side!r} is neither 'right' nor 'left'")
        if self.multiple < 1:
            wrong.append(f"multiple={self.multiple} is less than 1")
        if self.max_length is not None and self.max_length < 1:
            wrong.append(f"max_length={self.max_length} is less than 1")
        if self.truncate and self.max_length is None:
            wrong.append("truncate=True needs max_length")
        if wrong:
            raise BadInput("Pad: " + "; ".join(wrong))

    def length_of(self, longest: int) -> int:
        """Rows of a batch whose longest sample has `longest` rows."""
        rounded = -(-longest // self.multiple) * self.multiple
        return rounded if self.max_length is None else min(rounded, self.max_length)
