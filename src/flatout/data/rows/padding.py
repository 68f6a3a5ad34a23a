"""How one ragged field is padded, the rows it is padded with, and the dtypes that NumPy and torch share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.ground.errors import BadInput
from flatout.ground.units import round_up

Array = npt.NDArray[Any]
Longs = npt.NDArray[np.int64]


class Padded(NamedTuple):
    """A padded field, with its lengths and its mask if they were asked for."""

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
        if {type(self.lengths), type(self.mask)} == {str, bool} and True in (self.lengths, self.mask):
            wrong.append(f"lengths={self.lengths!r} and mask={self.mask!r}: name both or neither")
        if wrong:
            raise BadInput("Pad: " + "; ".join(wrong))

    def length_of(self, longest: int) -> int:
        """Return the rows of a batch whose longest sample has `longest` rows."""
        rounded = round_up(longest, self.multiple)
        return rounded if self.max_length is None else min(rounded, self.max_length)


MAX_KEPT_VIEWS = 8192


class PaddingRows:
    """Rows of padding, cut to every length that was asked for; cutting costs more than copying a short one.

    `form` is what the cuts are: "array", "tensor" or "bytes".
    """

    def __init__(
        self, value: float, trailing: Sequence[int], dtype: torch.dtype, *, form: str, field: str
    ) -> None:
        self._form = form
        try:
            self._row = torch.full((1, *trailing), value, dtype=dtype)
        except (RuntimeError, OverflowError, TypeError) as error:
            raise BadInput(f"field {field!r}: the pad value {value} does not fit into {dtype}") from error
        if not dtype.is_floating_point and self._row.numel() and self._row.flatten()[0].item() != value:
            raise BadInput(f"field {field!r}: the pad value {value} does not fit into {dtype}")
        self._bytes_per_row = self._row.nbytes
        self._make_rows(64)

    def _make_rows(self, count: int) -> None:
        tensor = self._row.expand(count, *self._row.shape[1:]).contiguous()
        if self._form == "tensor":
            self._rows: Any = tensor
        elif self._form == "array":
            self._rows = tensor.numpy()
        else:
            self._rows = memoryview(tensor.numpy().tobytes())
        self._num_rows = count
        self._views: list[Any] = []

    def beside(self, lengths: Sequence[int], length: int) -> list[Any]:
        """Return the padding rows that follow samples of `lengths`, up to `length`."""
        if length > self._num_rows:
            self._make_rows(max(length, 2 * self._num_rows))
        step = self._bytes_per_row if self._form == "bytes" else 1
        if length > MAX_KEPT_VIEWS:
            return [self._rows[: (length - n) * step] for n in lengths]
        self._views += [self._rows[: n * step] for n in range(len(self._views), length + 1)]
        return list(map(self._views[length::-1].__getitem__, lengths))


_TORCH_DTYPES: dict[Any, torch.dtype] = {}


def torch_dtype(dtype: np.dtype[Any], field: str) -> torch.dtype:
    """Return torch's counterpart of a NumPy dtype, or an error that names the field."""
    found = _TORCH_DTYPES.get(dtype)
    if found is None:
        try:
            found = _TORCH_DTYPES[dtype] = torch.from_numpy(np.empty(0, dtype)).dtype
        except (TypeError, ValueError) as error:
            raise BadInput(f"field {field!r}: torch has no dtype for NumPy's {dtype}") from error
    return found


def numpy_dtype(dtype: torch.dtype, field: str) -> np.dtype[Any]:
    """Return NumPy's counterpart of a torch dtype, or an error that names the field."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError as error:
        raise BadInput(
            f"field {field!r}: NumPy has no {dtype}", hint="cast the batch after it is made"
        ) from error
