"""Pieces of sequences, the table of rows they are gathered from, and where each row goes.

A piece says which rows of a tensor stand in each sequence.  The table holds the rows of all pieces end to
end.  Where lengths are on the host, NumPy checks them and makes the index, and one copy takes it to the GPU.
Lengths on a GPU stay there: the index is made of broadcast comparisons, and nothing is read back.

One gather then makes the sequences.  In the backward pass, autograd would make one addition per output row:
atomic, in no fixed order, and all padding rows would queue for the same address.  But if no row is used
twice, nothing has to be added: the gradient is the same rows copied back.

Letters: B samples, P pieces, L rows of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.data.rows.buffers import send
from flatout.data.rows.padding import Longs
from flatout.ground.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of every sequence; made by `rows`, `each` or `constant`."""

    kind: Literal["rows", "each", "constant"]
    values: Tensor
    lengths: Longs | Tensor | None  # B, an array on the host; None: every row there is
    start: Longs | Tensor | None = None  # B; None: 0


class Placed(NamedTuple):
    """Where each row of the sequences comes from, and what they are made of."""

    rows: Tensor  # B L, flat: the table row at each place
    starts: Tensor  # P B: where each piece begins in its sequence
    lengths: Tensor  # B
    length: int  # L


class PieceTable:
    """The rows of all pieces in one table, no row of it used twice.

    The table holds a tensor that two pieces read once if that can be told without waiting for a GPU: by its
    lengths on the host, or because the second piece starts where the first one ends.  Else it holds the
    tensor once per piece.  It holds shared rows once per sample and piece.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        owners = [piece for piece in pieces if piece.kind != "constant"]
        if not owners:
            raise BadInput("no piece has a batch axis", hint="give one made by ragged.rows or ragged.each")
        self.pieces = pieces
        self.batch = owners[0].values.size(0)
        self.item = owners[0].values.shape[2 if owners[0].kind == "rows" else 1 :]
        self.device = owners[0].values.device
        parts = [part for piece in pieces for part in (piece.lengths, piece.start)]
        self.on_host = not any(isinstance(part, Tensor) for part in parts)
        self.num_rows = [self._checked_rows(number, piece) for number, piece in enumerate(pieces)]
        spans: tuple[Any, Any] = self._checked_spans() if self.on_host else self._bounded_spans()
        self.lengths_PB, self.start = spans  # P B; on the host both are arrays
        self._place_rows()

    def _checked_rows(self, number: int, piece: Piece) -> int:
        """Return the rows of one sample in a piece; BadInput names the piece."""
        shape = tuple(piece.values.shape)
        leading = {"rows": 2, "each": 1}.get(piece.kind, len(shape) - len(self.item))
        if shape[leading:] != tuple(self.item) or not 0 <= leading <= 2:
            raise BadInput(
                f"piece {number} ({piece.kind}) has shape {shape}; its rows should have {tuple(self.item)}"
            )
        if piece.kind != "constant" and shape[0] != self.batch:
            raise BadInput(f"piece {number} has {shape[0]} samples, the pieces before it {self.batch}")
        for name, part in (("lengths", piece.lengths), ("start", piece.start)):
            if part is not None and tuple(part.shape) != (self.batch,):
                raise BadInput(
                    f"piece {number}: {name} has shape {tuple(part.shape)}, expected ({self.batch},)"
                )
        if piece.kind == "constant":
            return shape[0] if leading else 1
        return shape[1] if piece.kind == "rows" else 1

    def _checked_spans(self) -> tuple[Longs, Longs]:
        """Return P B: rows of each piece and the first of them; BadInput where a piece lacks some."""
        lengths = np.empty((len(self.pieces), self.batch), dtype=np.int64)
        start = np.zeros_like(lengths)
        for number, (piece, num_rows) in enumerate(zip(self.pieces, self.num_rows, strict=True)):
            if piece.start is not None:
                start[number] = piece.start
            if piece.lengths is None:
                lengths[number] = num_rows - start[number]
            else:
                lengths[number] = piece.lengths if piece.kind == "rows" else piece.lengths * num_rows
        there = np.array(self.num_rows)[:, None]
        wrong = (start < 0) | (lengths < 0) | (start + lengths > there)
        if wrong.any():
            number, b = (int(place[0]) for place in np.nonzero(wrong))
            raise BadInput(
                f"piece {number} of sample {b} asks for {lengths[number, b]} rows from row"
                f" {start[number, b]}; it has {self.num_rows[number]}"
            )
        return lengths, start

    def _bounded_spans(self) -> tuple[Tensor, list[Tensor | None]]:
        """Return the rows of each piece (P B) and the first of them, cut to the rows that are there.

        Only numbers go to the device here, never memory of the host: a CUDA graph may hold this.
        """
        lengths = []
        start = [None if piece.start is None else _sent(piece.start, self.device) for piece in self.pieces]
        for piece, first, num_rows in zip(self.pieces, start, self.num_rows, strict=True):
            if piece.lengths is None:
                count = torch.full((self.batch,), num_rows, device=self.device)
            else:
                count = _sent(piece.lengths, self.device)
                count = count * num_rows if piece.kind != "rows" and num_rows != 1 else count
            if piece.kind == "rows" and first is not None:
                count = torch.minimum(count, num_rows - first).clamp_(min=0)
            elif piece.kind == "rows" and piece.lengths is not None:
                count = count.clamp(min=0, max=num_rows)
            lengths.append(count)
        return torch.stack(lengths), start

    def _place_rows(self) -> None:
        """Put long pieces first in the table, then rows of single samples, then shared ones."""
        self.first_row = [0] * len(self.pieces)
        self._sources: list[Tensor] = []
        end = 0
        for kind in ("rows", "each", "constant"):
            placed: list[int] = []
            for number, piece in enumerate(self.pieces):
                if piece.kind != kind:
                    continue
                twin = next((i for i in placed if self._shares(i, number, placed)), None)
                placed.append(number)
                if twin is not None:
                    self.first_row[number] = self.first_row[twin]
                    continue
                self.first_row[number] = end
                self._sources.append(self._rows_of(number))
                end += self.batch * self.num_rows[number]
        self.pad_row = end

    def _shares(self, one: int, two: int, placed: Sequence[int]) -> bool:
        """Return whether piece `two` may read the table's rows of piece `one`."""
        values = self.pieces[two].values
        if self.pieces[two].kind != "rows" or self.pieces[one].values is not values:
            return False
        return all(self._disjoint(i, two) for i in placed if self.pieces[i].values is values)

    def _disjoint(self, one: int, two: int) -> bool:
        if not self.on_host:
            follows = self.pieces[one].start is None and self.pieces[one].lengths is self.pieces[two].start
            return follows and self.pieces[one].lengths is not None
        ends = self.start + self.lengths_PB
        apart = (ends[one] <= self.start[two]) | (ends[two] <= self.start[one])
        return bool(apart.all())

    def _rows_of(self, number: int) -> Tensor:
        piece, num_rows = self.pieces[number], self.num_rows[number]
        if piece.kind != "constant":
            return piece.values.reshape(self.batch * num_rows, *self.item)
        if num_rows == 1:
            return piece.values.reshape(1, *self.item).expand(self.batch, *self.item)
        shared = piece.values.reshape(1, num_rows, *self.item).expand(self.batch, -1, *self.item)
        return shared.reshape(self.batch * num_rows, *self.item)

    def sources(self) -> list[Tensor]:
        """Return the tensors that make the table, in their common dtype."""
        dtype = self._sources[0].dtype
        for source in self._sources[1:]:
            dtype = torch.promote_types(dtype, source.dtype)
        return [source.to(dtype) for source in self._sources]

    def place(self, max_length: int | None) -> Placed:
        """Place each piece of a sequence after the previous one."""
        return self._place_on_host(max_length) if self.on_host else self._place_on_device(max_length)

    def _place_on_host(self, max_length: int | None) -> Placed:
        _refuse_capture(self.device)
        lengths_PB, batch = self.lengths_PB, self.batch
        ends_PB = np.cumsum(lengths_PB, axis=0)
        total_B = ends_PB[-1]
        length = self.checked_length(total_B, max_length)
        # one buffer for all that goes to the device
        sizes = (batch * length, ends_PB.size, batch)
        buffer = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        index, starts, totals = np.split(buffer.numpy(), np.cumsum(sizes)[:-1])
        np.subtract(ends_PB, lengths_PB, out=starts.reshape(ends_PB.shape))
        totals[:] = total_B
        # Padding is one more piece, so that the pieces tile the whole B x L; its row is the table's last.
        shift_PB = self.base_on_host() - starts.reshape(ends_PB.shape) - np.arange(batch) * length
        shift_BQ = np.vstack([shift_PB, np.full((1, batch), self.pad_row)]).T
        count_BQ = np.vstack([lengths_PB, length - total_B[None]]).T
        np.add(np.repeat(shift_BQ.ravel(), count_BQ.ravel()), np.arange(batch * length), out=index)
        np.minimum(index, self.pad_row, out=index)
        moved = buffer.to(self.device, non_blocking=True)
        index_t, starts_t, totals_t = moved.split(sizes)
        return Placed(index_t, starts_t.view(ends_PB.shape), totals_t, length)

    def _place_on_device(self, max_length: int | None) -> Placed:
        ends_PB = self.lengths_PB.cumsum(0)
        length = max_length if max_length is not None else _longest(ends_PB[-1])
        starts_PB = (ends_PB - self.lengths_PB).clamp_(max=length)
        ends_PB = ends_PB.clamp_(max=length)
        pad_B = torch.full((1, self.batch), self.pad_row, device=self.device)
        shift_QB = torch.cat([self.base_on_device() - starts_PB, pad_B])
        places_L = torch.arange(length, device=self.device)
        piece_BL = (places_L >= ends_PB[:, :, None]).sum(0)
        index_BL = shift_QB.t().gather(1, piece_BL).add_(places_L).clamp_(max=self.pad_row)
        return Placed(index_BL.flatten(), starts_PB, ends_PB[-1], length)

    def base_on_host(self) -> Longs:
        """Return P B: the table row at which each piece begins."""
        first_P1, num_rows_P1 = np.array(self.first_row)[:, None], np.array(self.num_rows)[:, None]
        base: Longs = first_P1 + num_rows_P1 * np.arange(self.batch) + self.start
        return base

    def base_on_device(self) -> Tensor:
        """Return the same on the device."""
        columns = []
        for first, num_rows, start in zip(self.first_row, self.num_rows, self.start, strict=True):
            rows = torch.arange(
                first, first + self.batch * max(1, num_rows), max(1, num_rows), device=self.device
            )
            columns.append(rows if start is None else rows.add_(start))
        return torch.stack(columns)

    def checked_length(self, total_B: Longs, max_length: int | None) -> int:
        """Return L; BadInput where a sequence does not fit into `max_length`."""
        longest = int(total_B.max(initial=0))
        if max_length is None:
            return longest
        if longest > max_length:
            b = int(total_B.argmax())
            raise BadInput(f"sample {b} has {longest} rows, max_length is {max_length}")
        return max_length


def _longest(lengths_B: Tensor) -> int:
    """Read the longest back from the device: the only wait for it, and only without `max_length`."""
    return int(lengths_B.max()) if lengths_B.numel() else 0


def _sent(part: Longs | Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for its work."""
    if isinstance(part, Tensor):
        return part.to(device)
    _refuse_capture(device)
    return send(part, device)


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise BadInput(
            "a CUDA graph would keep reading lengths of the host that are gone",
            hint="put all lengths on the GPU and give max_length",
        )


def gather_rows(sources: Sequence[Tensor], index: Tensor, *, pad_value: float) -> Tensor:
    """Gather rows `index` of `sources`, laid end to end with a row of `pad_value` after the last.

    `index` may name the last row, the padding, any number of times and every other row once.
    """
    padding = sources[0].new_full((1, *sources[0].shape[1:]), pad_value)
    if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
        found: Tensor = _Gather.apply(index, *sources, padding)  # type: ignore[no-untyped-call]
        return found
    return _table([*sources, padding]).index_select(0, index)


def _table(sources: Sequence[Tensor]) -> Tensor:
    """Lay all rows end to end; small tensors are joined first.

    Shared rows come as expanded views, and a single such view makes torch use its slow copy for all parts.
    """
    whole = [source for source in sources if source.is_contiguous()]
    first_view = next((i for i, source in enumerate(sources) if not source.is_contiguous()), len(sources))
    if len(whole) == len(sources) or first_view == 0:
        return torch.cat(list(sources))
    return torch.cat([*sources[:first_view], torch.cat(list(sources[first_view:]))])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = [len(source) for source in sources]
        return _table(sources).index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        (index,) = ctx.saved_tensors
        rows = grad.new_zeros(sum(ctx.rows), *grad.shape[1:])
        # all padding writes to the last row; nobody reads what the last of them leaves there
        rows.index_copy_(0, index, grad)
        parts = torch.split(rows, ctx.rows)
        wanted: Sequence[bool] = ctx.needs_input_grad[1:]
        return (None, *(part if wants else None for part, wants in zip(parts, wanted, strict=True)))
