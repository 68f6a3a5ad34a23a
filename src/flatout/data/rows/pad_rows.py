"""One padded tensor from the arrays or tensors of a field, in one pass over the bytes.

The limit is a copy of the batch's bytes.  Copying row by row pays a slice and a dispatch per sample, far
more than the bytes of a short one.  But a batch is its samples with padding between them, end to end, so
one call that concatenates them writes it.  Which call is fastest was measured: for arrays of short rows
`bytearray.join`, whose cost per piece is a third of NumPy's; for long ones `numpy.concatenate` straight
into the batch's memory; for tensors, and with several threads for very long rows, `torch.cat`; for tensors of
equal length `torch.stack`, which compares the shapes itself, and whose result shows by its dtype whether all
samples fit into that of the first: looking at each would take half as long as the copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.data.rows.buffers import KEPT_BYTES, Buffers
from flatout.data.rows.padding import Array, Pad, PaddingRows, numpy_dtype, torch_dtype
from flatout.ground.errors import BadInput

JOINED_ROW_BYTES = 8192  # samples shorter than this are joined
# From this many elements on torch copies with all threads.  For torch.cat that is a gain where single samples
# are that long, and several times the cost per piece where only the batch is.
PARALLEL_ELEMENTS = 32768

# For a list of tensors autograd's part of a call is a fifth of the whole, no_grad or not.
_below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", torch.no_grad)

_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")
_ndim_of = attrgetter("ndim")


class _Rows(NamedTuple):
    """The samples of one field on their way into a batch."""

    samples: Sequence[Any]  # arrays or tensors
    lengths: list[int]
    shape: tuple[int, ...]  # of the batch
    pad: Pad
    field: str
    buffers: Buffers  # where the batch is written

    def empty(self, dtype: torch.dtype) -> Tensor:
        return self.buffers.empty(self.field, self.shape, dtype)


class PadRows:
    """Pads columns of arrays; keeps the padding it needs, cut to every length."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self._scratch = Buffers(pinned=False, reuse=None, stays=True)
        self._padding: dict[tuple[Any, ...], PaddingRows] = {}

    def __call__(self, column: Sequence[Any], *, pad: Pad, field: str) -> tuple[Tensor, list[int]]:
        """Pad arrays or tensors to one length; return them and the rows of each."""
        stacked = self._stack(column, pad, field)
        if stacked is not None:
            return stacked, [stacked.size(1)] * len(column)
        lengths, trailing = _common_shape(column, field)
        same = _same_dtype(column, field, pad)
        column, lengths = cut(column, lengths, pad, field)
        shape = (len(column), pad.length_of(max(lengths)), *trailing)
        if not math.prod(shape):
            dtype = pad.dtype or _as_torch(column[0].dtype, field)
            return self.buffers.empty(field, shape, dtype), lengths
        if not same and isinstance(column[0], Tensor):
            column, same = [tensor.to(pad.dtype or column[0].dtype) for tensor in column], True
        source = _as_torch(column[0].dtype, field)
        if not same or pad.dtype in (None, source):
            return self._write(_Rows(column, lengths, shape, pad, field, self.buffers), same=same), lengths
        # NumPy converts piece by piece and slowly, torch the whole batch at once
        values = self._write(_Rows(column, lengths, shape, pad, field, self._scratch), same=same)
        return self.buffers.empty(field, shape, pad.dtype).copy_(values), lengths

    def _write(self, rows: _Rows, *, same: bool) -> Tensor:
        """Write the batch in the samples' dtype, or in the dtype asked for where they have several."""
        first, shape = rows.samples[0], rows.shape
        parallel = math.prod(shape[1:]) >= PARALLEL_ELEMENTS and torch.get_num_threads() > 1
        if isinstance(first, Tensor):
            serial = torch.get_num_threads() == 1 or math.prod(shape) < PARALLEL_ELEMENTS
            if parallel or serial or first.dtype == torch.bfloat16:
                return self._cat(rows)
            rows = rows._replace(samples=_as_arrays(rows.samples))
        elif same and parallel:
            return self._cat(rows._replace(samples=list(map(torch.from_numpy, rows.samples))))
        row_bytes = rows.samples[0].dtype.itemsize * math.prod(shape[1:])
        if same and row_bytes < JOINED_ROW_BYTES and row_bytes * len(rows.samples) < KEPT_BYTES:
            joined = self._join(rows)
            if joined is not None:
                return joined
        return self._concatenate(rows, same=same)

    def _stack(self, column: Sequence[Any], pad: Pad, field: str) -> Tensor | None:
        """Make the batch by one call of torch.stack, where tensors are equal in length."""
        first = column[0]
        if not isinstance(first, Tensor) or not first.is_cpu or pad.dtype not in (None, first.dtype):
            return None
        shape = first.shape
        if shape != column[-1].shape or pad.length_of(shape[0]) != shape[0]:
            return None
        plain = self.buffers.plain(first.nbytes * len(column))
        if not plain and not _same_dtype(column, field, pad):  # into a buffer, torch would narrow
            return None
        try:
            if plain:
                with _below_autograd():
                    values = torch.stack(column)  # type: ignore[arg-type]
                return values if values.dtype == first.dtype else None
            values = self.buffers.empty(field, (len(column), *shape), first.dtype)
            with _below_autograd():
                return torch.stack(column, out=values)  # type: ignore[arg-type]
        except RuntimeError:  # one in between is longer or shorter
            return None

    def _join(self, rows: _Rows) -> Tensor | None:
        """Join the batch as one bytes-like object; None where a sample is not contiguous."""
        try:
            joined = bytearray().join(self._pieces(rows, form="bytes"))
        except (BufferError, TypeError, ValueError):
            return None
        dtype = torch_dtype(rows.samples[0].dtype, rows.field)
        values = torch.frombuffer(joined, dtype=dtype).view(rows.shape)
        return values if rows.buffers.plain(values.nbytes) else rows.empty(dtype).copy_(values)

    def _concatenate(self, rows: _Rows, *, same: bool) -> Tensor:
        pieces = self._pieces(rows, form="array")
        source = torch_dtype(rows.samples[0].dtype, rows.field)
        target = source if same else rows.pad.dtype or source
        values = rows.empty(target)
        if target == torch.bfloat16:  # NumPy cannot write it
            return values.copy_(torch.from_numpy(np.concatenate(pieces)).view(rows.shape))
        np.concatenate(pieces, out=values.numpy().reshape(-1, *rows.shape[2:]), casting="same_kind")
        return values

    def _cat(self, rows: _Rows) -> Tensor:
        pieces = list(self._pieces(rows, form="tensor"))
        if len(rows.shape) == 2 and len(pieces) > len(rows.samples):
            # one empty 1-D tensor makes torch.cat several times slower
            left = [rows.shape[1] - length for length in rows.lengths]
            pair = (rows.lengths, left) if rows.pad.side == "right" else (left, rows.lengths)
            pieces = list(compress(pieces, chain.from_iterable(zip(*pair, strict=True))))
        dtype = rows.samples[0].dtype
        with _below_autograd():
            if rows.buffers.plain(dtype.itemsize * math.prod(rows.shape)):
                return torch.cat(pieces).view(rows.shape)
            values = rows.empty(dtype)
            torch.cat(pieces, out=values.view(-1, *rows.shape[2:]))
            return values

    def _pieces(self, rows: _Rows, *, form: str) -> Sequence[Any]:
        """Return samples and their padding in the order of the batch's memory."""
        column, lengths, shape, pad = rows.samples, rows.lengths, rows.shape, rows.pad
        if lengths.count(shape[1]) == len(lengths):
            return column
        key = (form, column[0].dtype, shape[2:], pad.value)
        padding = self._padding.get(key)
        if padding is None:
            dtype = _as_torch(column[0].dtype, rows.field)
            padding = self._padding[key] = PaddingRows(
                pad.value, shape[2:], dtype, form=form, field=rows.field
            )
        pieces: list[Any] = [None] * (2 * len(column))
        sample = 0 if pad.side == "right" else 1
        pieces[sample::2] = column
        pieces[1 - sample :: 2] = padding.beside(lengths, shape[1])
        return pieces


def pad_lists(samples: Sequence[Sequence[Any]], *, pad: Pad, field: str) -> tuple[Tensor, list[int]]:
    """Pad lists of numbers, or of equal lists of numbers, to one length; return the rows of each too."""
    samples, lengths = cut(samples, list(map(len, samples)), pad, field)
    try:
        values = np.array(list(chain.from_iterable(samples)))
    except ValueError as error:
        raise BadInput(f"field {field!r}: its lists hold lists of different lengths") from error
    if not values.size:
        values = values.astype(np.int64)
    if values.dtype.kind not in "biufc":
        number = next(i for i, sample in enumerate(samples) if np.array(sample).dtype.kind not in "biufc")
        raise BadInput(f"field {field!r} of sample {number} holds something that is not a number")
    target = values.dtype if pad.dtype is None else numpy_dtype(pad.dtype, field)
    length = pad.length_of(max(lengths))
    padded = np.full((len(samples), length, *values.shape[1:]), pad.value, target)
    padded[mask_of(lengths, length, pad).numpy()] = values.astype(target, casting="same_kind")
    return torch.from_numpy(padded), lengths


def mask_of(lengths: Sequence[int], length: int, pad: Pad) -> Tensor:
    """Return B L, True where a row comes from a sample."""
    places = np.arange(length) if pad.side == "right" else np.arange(length)[::-1]
    return torch.from_numpy(places < np.array(lengths, dtype=np.int64)[:, None])


def cut(samples: Sequence[Any], lengths: list[int], pad: Pad, field: str) -> tuple[Sequence[Any], list[int]]:
    """Cut samples to `max_length`."""
    if pad.max_length is None or max(lengths) <= pad.max_length:
        return samples, lengths
    if not pad.truncate:
        number = next(i for i, length in enumerate(lengths) if length > pad.max_length)
        raise BadInput(
            f"field {field!r} of sample {number} has {lengths[number]} rows, max_length is {pad.max_length}",
            hint="cut it with Pad(truncate=True)",
        )
    limit = pad.max_length
    return [sample[:limit] for sample in samples], [min(length, limit) for length in lengths]


def _common_shape(column: Sequence[Any], field: str) -> tuple[list[int], tuple[int, ...]]:
    """Return every sample's rows and the trailing axes they share; BadInput names the odd one."""
    if len(column[0].shape) == 1 and set(map(_ndim_of, column)) == {1}:
        return list(map(Tensor.numel if isinstance(column[0], Tensor) else len, column)), ()
    shapes = list(map(_shape_of, column))
    if len(set(map(len, shapes))) == 1:
        lengths, *axes = zip(*shapes, strict=True)
        if all(len(set(axis)) == 1 for axis in axes):
            return list(lengths), tuple(axis[0] for axis in axes)
    expected = shapes[0]
    number = next(
        i for i, shape in enumerate(shapes) if (len(shape), shape[1:]) != (len(expected), expected[1:])
    )
    raise BadInput(
        f"field {field!r} of sample {number} has shape {tuple(shapes[number])}, that of sample 0"
        f" {tuple(expected)}: only the first axis may differ"
    )


def _same_dtype(column: Sequence[Any], field: str, pad: Pad) -> bool:
    """Return whether all samples have one dtype; an error where the batch cannot take them.

    Without `pad.dtype` the batch has that of sample 0, and takes samples whose dtype promotes to it.
    """
    found = set(map(_dtype_of, column))
    if pad.dtype is None and len(found) == 1:
        return True
    for dtype in found:
        if _fits(dtype, column[0].dtype, pad, field):
            continue
        number = next(i for i, array in enumerate(column) if array.dtype == dtype)
        if pad.dtype is None:
            raise BadInput(
                f"field {field!r} of sample {number} has dtype {dtype}, that of sample 0 {column[0].dtype}",
                hint="name the dtype of the batch: Pad(dtype=...)",
            )
        raise BadInput(f"field {field!r} of sample {number} has dtype {dtype}, which {pad.dtype} cannot hold")
    return len(found) == 1


def _as_torch(dtype: Any, field: str) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype, field)


def _fits(dtype: Any, first: Any, pad: Pad, field: str) -> bool:
    """Return whether a batch whose first sample has dtype `first` can take one of `dtype`."""
    if pad.dtype is not None:
        return torch.can_cast(_as_torch(dtype, field), pad.dtype)
    if isinstance(dtype, torch.dtype) != isinstance(first, torch.dtype):
        return False
    target = _as_torch(first, field)
    try:
        return dtype == first or torch.promote_types(_as_torch(dtype, field), target) == target
    except RuntimeError:  # torch promotes unsigned types wider than a byte to nothing
        return False


def _as_arrays(tensors: Sequence[Tensor]) -> list[Array]:
    try:
        return list(map(Tensor.numpy, tensors))
    except RuntimeError:  # some want a gradient or are lazy conjugates
        return [tensor.detach().resolve_conj().resolve_neg().numpy() for tensor in tensors]
