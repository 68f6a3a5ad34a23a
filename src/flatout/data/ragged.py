"""Sequences built from pieces of varying length, as one gather with its gradient.

    built = ragged.concat(
        [
            ragged.constant(start, where=has_previous),
            ragged.rows(context, previous_length),
            ragged.constant(end, where=has_previous),
            ragged.constant(start),
            ragged.rows(context, current_length, start=previous_length),
            ragged.each(query),
        ]
    )
    built.values, built.lengths, built.mask, built.starts[-1]

A loop over samples launches kernels per sample, and each row it reads gets a whole gradient of its own.
Here the rows of all pieces lie in one table and one index says which of them stands where: a handful of
kernels forward and backward, however many samples.  Lengths on the host cost one copy to the GPU; lengths on
the GPU stay there.

Letters: B samples, P pieces, N rows of a piece, L rows of the longest sequence, D any trailing axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.data.rows.buffers import send
from flatout.data.rows.padding import Longs
from flatout.data.rows.pieces import Piece, PieceTable, Placed, gather_rows
from flatout.ground.errors import BadInput

PADDING = -1  # the piece id of a row that belongs to no piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Built sequences, padded at the end."""

    values: Tensor  # B L D
    lengths: Tensor  # B
    starts: Tensor  # P B: where each piece begins in its sequence
    piece_ids: Tensor | None = None  # B L: the piece each row comes from, -1 in the padding; on demand

    @property
    def mask(self) -> Tensor:
        """B L, True where a row belongs to the sequence."""
        places = torch.arange(self.values.size(1), device=self.lengths.device)
        return places < self.lengths[:, None]


def rows(values_BND: Tensor, lengths: Any = None, *, start: Any = None) -> Piece:
    """Take of each sample the `lengths[b]` rows from `start[b]` (default: all, from 0)."""
    if values_BND.dim() < 2:
        raise BadInput(f"rows: values of shape {tuple(values_BND.shape)} have no batch and row axes")
    return Piece(kind="rows", values=values_BND, lengths=_longs(lengths), start=_longs(start))


def each(values_BD: Tensor, *, where: Any = None) -> Piece:
    """Take one row per sample, in the samples `where` (default: all)."""
    if values_BD.dim() < 1:
        raise BadInput("each: a scalar has no batch axis", hint="use ragged.constant for a shared row")
    return Piece(kind="each", values=values_BD, lengths=_flags(where))


def constant(values: Tensor, *, where: Any = None) -> Piece:
    """Share rows among all samples `where`: D or (1, D) for one row, (N, D) for several."""
    return Piece(kind="constant", values=values, lengths=_flags(where))


def concat(
    pieces: Sequence[Piece], *, pad_value: float = 0, max_length: int | None = None, piece_ids: bool = False
) -> Sequences:
    """Join the pieces of each sample one after another: B L D.

    Lengths may be lists, arrays or tensors.  Where all of them are on the host they are checked, and L is
    `max_length` or the longest sequence.  Lengths on a GPU are not read back if `max_length` is given:
    what does not fit into it, and rows that a piece does not have, are then left out.
    """
    table = PieceTable(pieces)
    placed = table.place(max_length)
    flat = gather_rows(table.sources(), placed.rows, pad_value=pad_value)
    ids = _piece_ids(placed) if piece_ids else None
    return Sequences(
        values=flat.view(table.batch, placed.length, *table.item),
        lengths=placed.lengths,
        starts=placed.starts,
        piece_ids=ids,
    )


def interleave(
    streams: Sequence[Piece], *, pad_value: float = 0, max_length: int | None = None, piece_ids: bool = False
) -> Sequences:
    """Take row 0 of every stream, then row 1 of every stream, and so on: B L D.

    A stream that has ended is left out.  Streams are made by `rows`; lengths are as in `concat`.
    """
    if any(stream.kind != "rows" for stream in streams):
        raise BadInput("interleave takes pieces made by ragged.rows only")
    table = PieceTable(streams)
    where = torch.device("cpu") if table.on_host else table.device
    lengths_PB = torch.as_tensor(table.lengths_PB)
    base_PB = torch.as_tensor(table.base_on_host() if table.on_host else table.base_on_device())
    lengths_B = lengths_PB.sum(0)
    if table.on_host:
        length = table.checked_length(lengths_B.numpy(), max_length)
    else:
        length = int(lengths_B.max()) if max_length is None else max_length
        lengths_B = lengths_B.clamp(max=length)
    # one place more than there are: rows that have none go there
    index = torch.full((table.batch, length + 1), table.pad_row, device=where)
    ids = torch.full_like(index, PADDING) if piece_ids else None
    for number in range(len(streams)):
        place_BN = _turns(lengths_PB, number, table.num_rows[number], length)
        rows_N = torch.arange(table.num_rows[number], device=where)
        index.scatter_(1, place_BN, base_PB[number][:, None] + rows_N)
        if ids is not None:
            ids.scatter_(1, place_BN, torch.full_like(place_BN, number))
    begun_PB = lengths_PB.clamp(max=1)
    parts = [index[:, :length].flatten(), begun_PB.cumsum(0) - begun_PB, lengths_B]
    parts += [] if ids is None else [ids[:, :length]]
    rows, starts_PB, lengths_B, *kept_ids = (send(part, table.device) for part in parts)
    flat = gather_rows(table.sources(), rows, pad_value=pad_value)
    return Sequences(
        values=flat.view(table.batch, length, *table.item),
        lengths=lengths_B,
        starts=starts_PB,
        piece_ids=kept_ids[0] if kept_ids else None,
    )


def _turns(lengths_PB: Tensor, number: int, num_rows: int, length: int) -> Tensor:
    """Return B N: the place of each row of one stream; a row that is not there gets place `length`."""
    time_N = torch.arange(num_rows, device=lengths_PB.device)
    earlier_P = torch.arange(len(lengths_PB), device=lengths_PB.device) < number
    # what comes before row t of this stream: t rows of every stream, t + 1 of those before it
    before_PBN = torch.minimum(lengths_PB[:, :, None], time_N + earlier_P[:, None, None])
    ended_BN = time_N >= lengths_PB[number][:, None]
    return before_PBN.sum(0).masked_fill(ended_BN, length).clamp(max=length)


def _piece_ids(placed: Placed) -> Tensor:
    places = torch.arange(placed.length, device=placed.starts.device)
    ids = (places >= placed.starts[1:, :, None]).sum(0)
    return ids.masked_fill(places >= placed.lengths[:, None], PADDING)


def _longs(values: Any) -> Longs | Tensor | None:
    """Return whole numbers as an array where they are on the host; a compiled graph keeps its tensors."""
    if values is None:
        return None
    if isinstance(values, Tensor) and (values.device.type != "cpu" or torch.compiler.is_compiling()):
        if values.is_floating_point():
            raise BadInput(f"lengths and starts are whole numbers, not {values.dtype}")
        return values.to(torch.int64)
    array = np.asarray(values)
    if array.dtype.kind not in "iub" and array.size:
        raise BadInput(f"lengths and starts are whole numbers, not {array.dtype}")
    return array.astype(np.int64, copy=False)


def _flags(where: Any) -> Longs | Tensor | None:
    if where is None:
        return None
    if isinstance(where, Tensor) and (where.device.type != "cpu" or torch.compiler.is_compiling()):
        return where.to(torch.bool).to(torch.int64)
    return np.asarray(where).astype(bool).astype(np.int64)
