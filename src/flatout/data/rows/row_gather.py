"""Records of flat arrays gathered many at once, on the host or on a device.

Row i of a record lies at its span's start plus i, so a whole batch is one index into the flat array.  On the
host the index is NumPy's, and a row of up to 16 bytes is moved as one machine word; records of a kilobyte
and more are cut out and concatenated instead, since an index costs more per row than a slice per record.
On a device the flat arrays and the spans lie there, and only the numbers of the records travel; the
longest of them is looked up on the host, so nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.data.rows.buffers import Buffers, send
from flatout.data.rows.pad_rows import PadRows
from flatout.data.rows.padding import Array, Longs, Pad, Padded, torch_dtype

SLICED_RECORD_BYTES = 1024  # records that are longer on average are cut out one by one
WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(frozen=True, slots=True)
class Span:
    """Where each record's rows lie in a flat array; fields of the same lengths share one."""

    starts: Longs
    lengths: Longs


class HostRows:
    """Gathers from arrays in host memory, or mapped into it."""

    def __init__(
        self,
        fields: Mapping[str, Array],
        spans: Mapping[str, Span],
        *,
        buffers: Buffers | None = None,
        sliced_record_bytes: int = SLICED_RECORD_BYTES,
    ) -> None:
        self._fields, self._spans = fields, spans
        self._sliced_record_bytes = sliced_record_bytes
        self._buffers = buffers or Buffers(pinned=False, reuse=None)
        self._scratch = Buffers(pinned=False, reuse=None, stays=True)
        self._pad_rows = PadRows(self._buffers)

    def padded(self, indices: Longs, names: Sequence[str], pads: Mapping[str, Pad]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        plain = Pad()
        for name in names:
            flat, pad = self._fields[name], pads.get(name, plain)
            span = self._spans.get(name)
            if span is None:
                batch[name] = self._fixed(name, indices)
                continue
            lengths = np.minimum(span.lengths[indices], pad.max_length or np.iinfo(np.int64).max)
            starts = span.starts[indices]
            if self._are_long(flat, lengths):
                values, _ = self._pad_rows(_slices(flat, starts, lengths), pad=pad, field=name)
            else:
                values = self._padded(name, starts, lengths, pad)
            add_padded(batch, name, values, torch.from_numpy(lengths), pad)
        return batch

    def _padded(self, name: str, starts: Longs, lengths: Longs, pad: Pad) -> Tensor:
        """Gather short records by one index."""
        flat = self._fields[name]
        source = torch_dtype(flat.dtype, name)
        converted = pad.dtype not in (None, source)
        shape = (len(starts), pad.length_of(int(lengths.max(initial=0))), *flat.shape[1:])
        values = (self._scratch if converted else self._buffers).empty(name, shape, source)
        fill_padded(values.numpy(), flat, starts, lengths, pad)
        if pad.dtype is None or not converted:
            return values
        return self._buffers.empty(name, shape, pad.dtype).copy_(values)

    def packed(self, indices: Longs, names: Sequence[str]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {}
        for name in names:
            flat, span = self._fields[name], self._spans.get(name)
            if span is None:
                batch[name] = self._fixed(name, indices)
                continue
            starts, lengths = span.starts[indices], span.lengths[indices]
            shape = (int(lengths.sum()), *flat.shape[1:])
            values = self._buffers.empty(name, shape, torch_dtype(flat.dtype, name))
            if self._are_long(flat, lengths):
                np.concatenate(_slices(flat, starts, lengths), out=values.numpy())
            else:
                _take(flat, _consecutive(starts, lengths), values.numpy())
            batch[name] = values
            batch[f"{name}_offsets"] = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        return batch

    def _are_long(self, flat: Array, lengths: Longs) -> bool:
        row_bytes = flat.dtype.itemsize * math.prod(flat.shape[1:])
        return len(lengths) > 0 and int(lengths.sum()) * row_bytes >= self._sliced_record_bytes * len(lengths)

    def _fixed(self, name: str, indices: Longs) -> Tensor:
        flat = self._fields[name]
        values = self._buffers.empty(name, (len(indices), *flat.shape[1:]), torch_dtype(flat.dtype, name))
        _take(flat, indices, values.numpy())
        return values


class DeviceRows:
    """Gathers from arrays that lie on a device."""

    def __init__(self, fields: Mapping[str, Array], spans: Mapping[str, Span], device: torch.device) -> None:
        self._device = device
        self._fields = {name: torch.from_numpy(flat).to(device) for name, flat in fields.items()}
        self._host_spans = spans
        moved: dict[int, tuple[Tensor, Tensor]] = {}
        self._spans: dict[str, tuple[Tensor, Tensor]] = {}
        for name, span in spans.items():
            if id(span) not in moved:
                moved[id(span)] = (
                    torch.from_numpy(span.starts).to(device),
                    torch.from_numpy(span.lengths).to(device),
                )
            self._spans[name] = moved[id(span)]

    def padded(self, indices: Longs, names: Sequence[str], pads: Mapping[str, Pad]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        plain = Pad()
        chosen = send(indices, self._device)
        places: dict[tuple[int, int, str], tuple[Tensor, Tensor, Tensor]] = {}
        for name in names:
            flat, pad = self._fields[name], pads.get(name, plain)
            if name not in self._spans:
                batch[name] = flat.index_select(0, chosen)
                continue
            span = self._host_spans[name]
            length = pad.length_of(int(span.lengths[indices].max(initial=0)))
            key = (id(span), length, pad.side)
            if key not in places:
                places[key] = self._places(name, chosen, length, pad)
            index, there, lengths = places[key]
            shape = (len(indices), length, *flat.shape[1:])
            if len(flat):
                values = flat.index_select(0, index).view(shape)
                values.masked_fill_(~there.view(*there.shape, *[1] * (flat.dim() - 1)), pad.value)
            else:
                values = flat.new_full(shape, pad.value)
            add_padded(batch, name, values, lengths, pad, mask=there)
        return batch

    def _places(self, name: str, chosen: Tensor, length: int, pad: Pad) -> tuple[Tensor, Tensor, Tensor]:
        """Return which flat row stands at each place, whether one does, and the rows of each record."""
        starts, lengths = (part.index_select(0, chosen) for part in self._spans[name])
        lengths = lengths.clamp(max=length)
        places = torch.arange(length, device=self._device).expand(len(chosen), -1)
        if pad.side == "left":
            places = places - (length - lengths)[:, None]
        there = places < lengths[:, None] if pad.side == "right" else places >= 0
        return torch.where(there, starts[:, None] + places, 0).flatten(), there, lengths

    def packed(self, indices: Longs, names: Sequence[str]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {}
        chosen = send(indices, self._device)
        for name in names:
            flat = self._fields[name]
            if name not in self._spans:
                batch[name] = flat.index_select(0, chosen)
                continue
            starts, lengths = (part.index_select(0, chosen) for part in self._spans[name])
            total = int(self._host_spans[name].lengths[indices].sum())
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
            batch[name] = flat.index_select(0, shift + torch.arange(total, device=self._device))
            batch[f"{name}_offsets"] = offsets
        return batch


def fill_padded(out: Array, flat: Array, starts: Longs, lengths: Longs, pad: Pad) -> None:
    """Write the records' rows and their padding into `out`, B L ...."""
    length = out.shape[1]
    if not len(flat) or not out.size:
        out[...] = pad.value
        return
    places = np.arange(length)
    there = (places if pad.side == "right" else places[::-1]) < lengths[:, None]
    words, out_words = _words(flat, out, rows=2)
    if words.ndim == 1:
        out[...] = pad.value
        out_words[there] = words.take(_consecutive(starts, lengths))
        return
    first = starts if pad.side == "right" else starts - (length - lengths)
    np.take(words, np.where(there, first[:, None] + places, 0), axis=0, out=out_words, mode="clip")
    if not there.all():
        out[~there] = pad.value


def add_padded(
    batch: dict[str, Any], name: str, values: Tensor, lengths: Tensor, pad: Pad, mask: Tensor | None = None
) -> None:
    """Put a padded field into a batch, with the lengths and the mask that were asked for."""
    if pad.dtype is not None:
        values = values.to(pad.dtype)
    if pad.mask and mask is None:
        places = torch.arange(values.size(1))
        mask = (places if pad.side == "right" else places.flip(0)) < lengths[:, None]
    if pad.lengths is True or pad.mask is True:
        batch[name] = Padded(values, lengths if pad.lengths else None, mask if pad.mask else None)
        return
    batch[name] = values
    if isinstance(pad.lengths, str):
        batch[pad.lengths] = lengths
    if isinstance(pad.mask, str):
        batch[pad.mask] = mask


def _slices(flat: Array, starts: Longs, lengths: Longs) -> list[Array]:
    ends = starts + lengths
    return [flat[first:last] for first, last in zip(starts.tolist(), ends.tolist(), strict=True)]


def _consecutive(starts: Longs, lengths: Longs) -> Longs:
    """Return the numbers of all rows of all records, one record after another."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def _take(flat: Array, rows: Longs, out: Array) -> None:
    if out.size:
        words, out_words = _words(flat, out)
        np.take(words, rows, axis=0, out=out_words, mode="clip")


def _words(flat: Array, out: Array, *, rows: int = 1) -> tuple[Array, Array]:
    """View each row of both arrays as one word, if a word is as wide as a row; else leave them.

    `rows` is the number of axes before a row of `out`; `flat` has one.
    """
    row_bytes = flat.dtype.itemsize * math.prod(flat.shape[1:])
    word = WORDS.get(row_bytes)
    if word is None or not all(
        array.size and array.flags.c_contiguous and array.flags.aligned for array in (flat, out)
    ):
        return flat, out
    return flat.reshape(-1).view(word), out.reshape(-1).view(word).reshape(out.shape[:rows])
