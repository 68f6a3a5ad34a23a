"""Ragged samples into padded batches, one copy per field.

The usual collate makes a padded copy of every sample, stacks the copies and turns the stack into a tensor:
each byte is moved three times, by a handful of calls per sample and field.  Here each field of a batch is
written once, by one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.data.rows.buffers import Buffers
from flatout.data.rows.pad_rows import PadRows, mask_of, pad_lists
from flatout.data.rows.padding import Pad, Padded, numpy_dtype, torch_dtype
from flatout.ground.errors import BadInput

NUMBERS = (bool, int, float, complex, np.generic)
HANDED_ON = (str, bytes, type(None))
ARRAYS = (Tensor, np.ndarray)
KINDS = (np.ndarray, Tensor, list)


class PadCollate:
    """A `collate_fn` that pads the first axis of every array to the longest sample of the batch.

    Samples are arrays, tensors, lists of numbers, numbers, or dicts and tuples of them.  `fields` names
    those that need their own `Pad`, by path: "tokens", "context.states", "0" for the first of a tuple, ""
    for a sample that is an array itself.  Strings are handed on as a list.

    `pinned` asks for page-locked memory where there is a GPU; `reuse` keeps that many buffers per field
    and takes one again once nothing refers to it; by default two of fields of 1 MiB and more.  Inside a
    DataLoader's worker both give way to shared memory, into which batches are written directly.
    """

    def __init__(
        self,
        fields: Mapping[str, Pad] | None = None,
        *,
        default: Pad | None = None,
        pinned: bool = False,
        reuse: int | None = None,
    ) -> None:
        if reuse is not None and reuse < 0:
            raise BadInput(f"reuse={reuse} is below 0", hint="give a number of buffers, or None")
        self._fields = dict(fields or {})
        self._default = default or Pad()
        self._buffers = Buffers(pinned=pinned, reuse=reuse)
        self._pad_rows = PadRows(self._buffers)
        self._seen: set[str] = set()

    def __getstate__(self) -> tuple[dict[str, Pad], Pad, Buffers]:
        return self._fields, self._default, self._buffers

    def __setstate__(self, state: tuple[dict[str, Pad], Pad, Buffers]) -> None:
        self._fields, self._default, self._buffers = state
        self._pad_rows = PadRows(self._buffers)
        self._seen = set()

    def __call__(self, samples: Sequence[Any]) -> Any:
        if not samples:
            raise BadInput("there are no samples to collate")
        batch = self._collate(samples, "")
        if self._fields and self._fields.keys() - self._seen:
            named = sorted(self._fields.keys() - self._seen)
            raise BadInput(f"no field {named[0]!r} in the samples", hint=f"they have {sorted(self._seen)}")
        return batch

    def _collate(self, column: Sequence[Any], field: str) -> Any:
        """Collate one field of all samples, or the structure of fields below it."""
        first = column[0]
        if isinstance(first, ARRAYS) and first.ndim:
            return self._collate_arrays(column, field)
        if isinstance(first, Mapping):
            return self._collate_mapping(column, field)
        if isinstance(first, tuple) or isinstance(first, list) and _is_structure(column):
            return self._collate_sequence(column, field)
        self._seen.add(field)
        if isinstance(first, HANDED_ON) or isinstance(first, list) and _holds_text(column):
            return list(column)
        if _is_number(first):
            return self._stack(column, field, self._fields.get(field, self._default))
        return self._collate_arrays(column, field)

    def _collate_arrays(self, column: Sequence[Any], field: str) -> Any:
        self._seen.add(field)
        pad = self._fields.get(field, self._default)
        values, lengths = self._pad(column, field, pad)
        if not pad.lengths and not pad.mask:
            return values
        named = isinstance(pad.lengths, str) or isinstance(pad.mask, str)
        counts = self._kept(torch.tensor(lengths), f"{field} lengths") if pad.lengths else None
        mask = self._kept(mask_of(lengths, values.size(1), pad), f"{field} mask") if pad.mask else None
        return (_Named if named else Padded)(values, counts, mask)

    def _kept(self, values: Tensor, field: str) -> Tensor:
        """Return the values, copied into shared or page-locked memory if the buffers require it."""
        if self._buffers.plain(0):  # large or not, these have their memory
            return values
        return self._buffers.empty(field, values.shape, values.dtype).copy_(values)

    def _pad(self, column: Sequence[Any], field: str, pad: Pad) -> tuple[Tensor, list[int]]:
        if isinstance(column[0], list):
            _same_kind(column, field)
            values, lengths = pad_lists(column, pad=pad, field=field)
            return self._kept(values, field), lengths
        try:
            return self._pad_rows(column, pad=pad, field=field)
        except (AttributeError, TypeError, BadInput):
            _same_kind(column, field)  # a sample of another kind is the plainer explanation
            raise

    def _collate_mapping(self, column: Sequence[Mapping[Any, Any]], field: str) -> dict[Any, Any]:
        names = column[0].keys()
        _same_fields(column, field)
        batch: dict[Any, Any] = {}
        for name in names:
            path = f"{field}.{name}" if field else str(name)
            values = self._collate(_values(column, name, field), path)
            if isinstance(values, _Named):
                pad = self._fields.get(path, self._default)
                for extra, tensor in ((pad.lengths, values.lengths), (pad.mask, values.mask)):
                    if tensor is not None:
                        if extra in names or extra in batch:
                            raise BadInput(
                                f"{path!r}: there is a field {extra!r} already", hint="choose another name"
                            )
                        batch[extra] = tensor
                values = values.values
            batch[name] = values
        return batch

    def _collate_sequence(self, column: Sequence[Any], field: str) -> Any:
        first = column[0]
        for number, sample in enumerate(column):
            if not isinstance(sample, type(first)) or len(sample) != len(first):
                raise _odd_one(column, number, field)
        parts = [
            self._collate(part, f"{field}.{i}" if field else str(i))
            for i, part in enumerate(zip(*column, strict=True))
        ]
        if any(isinstance(part, _Named) for part in parts):
            raise BadInput(
                "lengths and masks get names in dicts only", hint="in tuples use lengths=True, mask=True"
            )
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)

    def _stack(self, column: Sequence[Any], field: str, pad: Pad) -> Tensor:
        """Stack one number per sample."""
        odd = next((i for i, value in enumerate(column) if not _is_number(value)), None)
        if odd is not None:
            raise _odd_one(column, odd, field)
        if any(isinstance(value, Tensor) for value in column):
            return self._kept(_stack_tensors(column, pad), field)
        values = np.array(column)
        target = values.dtype if pad.dtype is None else numpy_dtype(pad.dtype, field)
        if self._buffers.plain(0) and target == values.dtype:
            return torch.from_numpy(values)
        tensor = self._buffers.empty(field, values.shape, torch_dtype(target, field))
        np.copyto(tensor.numpy(), values, casting="same_kind")
        return tensor


def _stack_tensors(column: Sequence[Any], pad: Pad) -> Tensor:
    """Stack tensors of one number each, perhaps with numbers of other kinds among them."""
    stacked = torch.stack([torch.as_tensor(value, device="cpu") for value in column]).detach()
    return stacked if pad.dtype is None else stacked.to(pad.dtype)


class _Named(Padded):
    """A padded field whose lengths or mask get names of their own in the dict around it."""


def _is_structure(column: Sequence[Any]) -> bool:
    """Return whether a column of lists is to be collated item by item, like tuples."""
    item = next((sample[0] for sample in column if isinstance(sample, list) and sample), None)
    return isinstance(item, (Mapping, tuple, Tensor, np.ndarray))


def _holds_text(column: Sequence[Any]) -> bool:
    item = next((sample[0] for sample in column if isinstance(sample, list) and sample), None)
    return isinstance(item, (str, bytes))


def _is_number(value: Any) -> bool:
    return isinstance(value, NUMBERS) or getattr(value, "shape", None) == ()


def _same_kind(column: Sequence[Any], field: str) -> None:
    """Raise BadInput if a field is an array in one sample and something else in another."""
    kinds = set(map(type, column))
    first = next((kind for kind in KINDS if isinstance(column[0], kind)), None)
    if first is None:
        raise BadInput(f"field {field!r} of sample 0 is {_describe(column[0])}, which cannot be batched")
    if not all(issubclass(kind, first) for kind in kinds):
        number = next(i for i, value in enumerate(column) if not isinstance(value, first))
        raise _odd_one(column, number, field)
    if first is Tensor and column[0].device.type != "cpu":
        raise BadInput(
            f"field {field!r} of sample 0 is on {column[0].device}",
            hint="samples are collated in host memory",
        )


def _odd_one(column: Sequence[Any], number: int, field: str) -> BadInput:
    """Make the error for a sample that differs from the first."""
    place = f"field {field!r}" if field else "the value"
    return BadInput(
        f"{place} of sample {number} is {_describe(column[number])}, of sample 0 {_describe(column[0])}"
    )


def _values(column: Sequence[Mapping[Any, Any]], name: Any, field: str) -> list[Any]:
    try:
        return list(map(itemgetter(name), column))
    except (KeyError, IndexError, TypeError):
        raise _other_fields(column, field) from None


def _same_fields(column: Sequence[Any], field: str) -> None:
    """Raise BadInput where a sample has more fields than the first; `_values` finds one that lacks some."""
    try:
        if sum(map(len, column)) == len(column[0]) * len(column):
            return
    except TypeError:
        pass
    raise _other_fields(column, field)


def _other_fields(column: Sequence[Any], field: str) -> BadInput:
    """Make the error for a sample whose fields are not those of the first."""
    names = column[0].keys()
    for number, sample in enumerate(column):
        if not isinstance(sample, Mapping):
            return _odd_one(column, number, field)
    number = next(i for i, sample in enumerate(column) if sample.keys() != names)
    missing = [name for name in names if name not in column[number]]
    extra = [name for name in column[number] if name not in names]
    inside = f" in {field!r}" if field else ""
    if missing:
        return BadInput(f"sample {number} lacks field {missing[0]!r}{inside}, which sample 0 has")
    return BadInput(f"sample {number} has field {extra[0]!r}{inside}, which sample 0 lacks")


def _describe(value: Any) -> str:
    if isinstance(value, ARRAYS):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
