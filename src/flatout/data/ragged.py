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
Here the rows of all pieces lie in one table and one index says which of them stands where: two kernels
forward, a handful backward, however many samples.  Lengths on the host cost one small copy to the GPU;
lengths on the GPU stay there.

Letters: B samples, P pieces, N rows of a piece, L rows of the longest sequence, D any trailing axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.data import gather
from flatout.data.pieces import Piece, PieceTable
from flatout.errors import BadInput

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
    """Of each sample the `lengths[b]` rows from `start[b]` (default: from 0, all there are)."""
    if values_BND.dim() < 2:
        raise BadInput(f"rows: values of shape {tuple(values_BND.shape)} have no batch and row axes")
    return Piece(kind="rows", values=values_BND, lengths=_longs(lengths), start=_longs(start))


def each(values_BD: Tensor, *, where: Any = None) -> Piece:
    """One row per sample, in the samples `where` (default: all)."""
    if values_BD.dim() < 1:
        raise BadInput("each: a scalar has no batch axis", hint="use ragged.constant for a shared row")
    return Piece(kind="each", values=values_BD, lengths=_flags(where))


def constant(values: Tensor, *, where: Any = None) -> Piece:
    """Rows that all samples share: D or (1, D) for one row, (N, D) for several, in the samples `where`."""
    return Piece(kind="constant", values=values, lengths=_flags(where))


def concat(
    pieces: Sequence[Piece], *, pad_value: float = 0, max_length: int | None = None, piece_ids: bool = False
) -> Sequences:
    """The pieces of each sample one after another: B L D.

    Lengths may be lists, arrays or tensors.  Where all of them are on the host they are checked, and L is
    `max_length` or the longest sequence.  Lengths on a GPU are not read back if `max_length` is given:
    what does not fit into it, and rows that a piece does not have, are then left out.
    """
    table = PieceTable(pieces)
    lengths_BP, base_BP = table.lengths(), table.base()
    ends_BP = lengths_BP.cumsum(1)
    length = table.padded_length(ends_BP[:, -1], max_length)
    if not table.on_host:
        ends_BP = ends_BP.clamp(max=length)
    starts_BP = torch.cat([ends_BP.new_zeros(table.batch, 1), ends_BP[:, :-1]], dim=1)
    # Padding is one more piece, so that the pieces tile the whole B x L; its row is the table's last.
    origin_B = torch.arange(table.batch, device=ends_BP.device) * length
    first_BQ = torch.cat([starts_BP, ends_BP[:, -1:]], dim=1) + origin_B[:, None]
    after_BQ = torch.cat([first_BQ[:, 1:], origin_B[:, None] + length], dim=1)
    base_BQ = torch.cat([base_BP, torch.full_like(origin_B, table.pad_row)[:, None]], dim=1)
    parts = torch.stack([base_BQ - first_BQ, after_BQ - first_BQ]).flatten(1)
    parts, starts_PB, lengths_B = table.to_device(parts, starts_BP.t().contiguous(), ends_BP[:, -1])
    index = gather.expand(parts, num_rows=table.batch * length, last_row=table.pad_row)
    values = table.build(index, starts_PB, lengths_B, length=length, pad_value=pad_value)
    ids = _piece_ids(starts_PB, lengths_B, length) if piece_ids else None
    return Sequences(values=values, lengths=lengths_B, starts=starts_PB, piece_ids=ids)


def interleave(
    streams: Sequence[Piece], *, pad_value: float = 0, max_length: int | None = None, piece_ids: bool = False
) -> Sequences:
    """Row 0 of every stream, then row 1 of every stream, and so on: B L D.

    A stream that has ended is left out.  Streams are made by `rows`; lengths are as in `concat`.
    """
    if any(stream.kind != "rows" for stream in streams):
        raise BadInput("interleave takes pieces made by ragged.rows only")
    table = PieceTable(streams, shared=False)
    lengths_BP, base_BP = table.lengths(), table.base()
    lengths_B = lengths_BP.sum(1)
    length = table.padded_length(lengths_B, max_length)
    if not table.on_host:
        lengths_B = lengths_B.clamp(max=length)
    index = torch.full((table.batch, length + 1), table.pad_row, device=lengths_BP.device)
    ids = torch.full_like(index, PADDING) if piece_ids else None
    for number, stream in enumerate(streams):
        time_N = torch.arange(stream.values.size(1), device=index.device)
        turns_P = torch.arange(len(streams), device=index.device) < number
        # rows that come before row t of this stream: t of every stream, t + 1 of those before it
        before_BNP = torch.minimum(lengths_BP[:, None], time_N[:, None] + turns_P)
        ended_BN = time_N >= lengths_BP[:, number, None]
        place_BN = before_BNP.sum(2).masked_fill(ended_BN, length).clamp(max=length)
        index.scatter_(1, place_BN, base_BP[:, number, None] + time_N)
        if ids is not None:
            ids.scatter_(1, place_BN, torch.full_like(place_BN, number))
    index = index[:, :length].flatten()
    starts_PB = lengths_BP.clamp(max=1).cumsum(1).sub(lengths_BP.clamp(max=1)).t().contiguous()
    kept_ids = index if ids is None else ids[:, :length].contiguous()
    index, starts_PB, lengths_B, kept_ids = table.to_device(index, starts_PB, lengths_B, kept_ids)
    values = table.build(index, starts_PB, lengths_B, length=length, pad_value=pad_value)
    return Sequences(
        values=values, lengths=lengths_B, starts=starts_PB, piece_ids=None if ids is None else kept_ids
    )


def _piece_ids(starts_PB: Tensor, lengths_B: Tensor, length: int) -> Tensor:
    places = torch.arange(length, device=starts_PB.device)
    ids = (places >= starts_PB[1:, :, None]).sum(0)
    return ids.masked_fill(places >= lengths_B[:, None], PADDING)


def _longs(values: Any) -> Tensor | None:
    if values is None:
        return None
    tensor = torch.as_tensor(values)
    if tensor.is_floating_point() and tensor.numel():
        raise BadInput(f"lengths and starts are whole numbers, not {tensor.dtype}")
    return tensor.to(torch.int64)


def _flags(where: Any) -> Tensor | None:
    return None if where is None else torch.as_tensor(where).to(torch.bool).to(torch.int64)
