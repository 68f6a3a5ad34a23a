"""Pieces of sequences, and the table of rows they are gathered from.

A piece says which rows of a tensor stand in each sequence.  The table holds the rows of all pieces end to
end; where the lengths can be read without waiting for a GPU, they are checked against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flatout.data import gather
from flatout.data.gather import Source
from flatout.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of every sequence; made by `rows`, `each` or `constant`."""

    kind: Literal["rows", "each", "constant"]
    values: Tensor
    lengths: Tensor | None  # B; None: every row there is
    start: Tensor | None = None  # B; None: 0

    @property
    def on_host(self) -> bool:
        return all(part is None or part.device.type == "cpu" for part in (self.lengths, self.start))


class PieceTable:
    """The rows of all pieces in one table, and where in it the pieces of each sample begin.

    A tensor that several pieces read lies in the table once if no row of it is used twice, which can be
    seen on the host only; else once per piece, so that the gradient never has to add rows up.
    """

    def __init__(self, pieces: Sequence[Piece], *, shared: bool = True) -> None:
        owners = [piece for piece in pieces if piece.kind != "constant"]
        if not owners:
            raise BadInput("no piece has a batch axis", hint="give one made by ragged.rows or ragged.each")
        self.pieces = pieces
        self.batch = owners[0].values.size(0)
        self.item = owners[0].values.shape[2 if owners[0].kind == "rows" else 1 :]
        self.device = owners[0].values.device
        # a compiled graph would break where it reads a length
        self.on_host = all(piece.on_host for piece in pieces) and not torch.compiler.is_compiling()
        self._num_rows = [self._checked_rows(number, piece) for number, piece in enumerate(pieces)]
        self._place_rows(shared=shared and self.on_host)

    def _checked_rows(self, number: int, piece: Piece) -> int:
        """Rows of one sample in a piece, or an error that names the piece."""
        shape = tuple(piece.values.shape)
        leading = {"rows": 2, "each": 1}.get(piece.kind, len(shape) - len(self.item))
        if shape[leading:] != tuple(self.item) or not 0 <= leading <= 2:
            raise BadInput(
                f"piece {number} ({piece.kind}) has shape {shape}; its rows should have {tuple(self.item)}"
            )
        if piece.kind != "constant" and shape[0] != self.batch:
            raise BadInput(f"piece {number} has {shape[0]} samples, the pieces before it {self.batch}")
        for name, part in (("lengths", piece.lengths), ("start", piece.start)):
            if part is not None and part.shape != (self.batch,):
                raise BadInput(
                    f"piece {number}: {name} has shape {tuple(part.shape)}, expected ({self.batch},)"
                )
        if piece.kind == "constant":
            return shape[0] if leading else 1
        return shape[1] if piece.kind == "rows" else 1

    def _place_rows(self, *, shared: bool) -> None:
        self.sources: list[Source] = []
        self._source_of: list[int] = []
        end = 0
        for number, piece in enumerate(self.pieces):
            found = next((i for i in range(number) if self._shares(i, number, shared=shared)), None)
            if found is not None:
                self._source_of.append(self._source_of[found])
                if piece.kind == "constant":
                    self.sources[self._source_of[found]].pieces.append(number)
                continue
            num_rows = self._num_rows[number] * (1 if piece.kind == "constant" else self.batch)
            is_constant = piece.kind == "constant"
            self._source_of.append(len(self.sources))
            self.sources.append(
                Source(first_row=end, num_rows=num_rows, pieces=[number] if is_constant else [])
            )
            end += num_rows
        self.pad_row = end

    def _shares(self, earlier: int, later: int, *, shared: bool) -> bool:
        """Whether two pieces may read the same rows of the table."""
        one, two = self.pieces[earlier], self.pieces[later]
        if one.values is not two.values or one.kind != two.kind or one.kind == "each":
            return False
        if one.kind == "constant":
            return True
        others = [i for i in range(later) if self.pieces[i].values is two.values]
        return shared and all(self._disjoint(i, later) for i in others)

    def _disjoint(self, one: int, two: int) -> bool:
        from_one, from_two = self._start(one), self._start(two)
        to_one, to_two = from_one + self._length(one), from_two + self._length(two)
        return bool(torch.all((to_one <= from_two) | (to_two <= from_one)))

    def _start(self, number: int) -> Tensor:
        start = self.pieces[number].start
        where = "cpu" if self.on_host else self.device
        return torch.zeros(self.batch, dtype=torch.int64, device=where) if start is None else start.to(where)

    def _length(self, number: int) -> Tensor:
        piece, num_rows = self.pieces[number], self._num_rows[number]
        where = "cpu" if self.on_host else self.device
        if piece.lengths is not None:
            lengths = piece.lengths.to(where)
            return lengths if piece.kind == "rows" else lengths * num_rows
        return torch.full((self.batch,), num_rows, device=where) - self._start(number)

    def lengths(self) -> Tensor:
        """B P: the rows of each piece, checked on the host and bounded elsewhere."""
        lengths = [self._length(number) for number in range(len(self.pieces))]
        for number, piece in enumerate(self.pieces):
            if piece.kind != "rows":
                continue
            first, last = self._start(number), self._num_rows[number]
            if not self.on_host:
                lengths[number] = torch.minimum(lengths[number], last - first).clamp(min=0)
                continue
            wrong = (first < 0) | (lengths[number] < 0) | (first + lengths[number] > last)
            if bool(wrong.any()):
                b = int(wrong.nonzero()[0])
                raise BadInput(
                    f"piece {number} of sample {b} asks for {int(lengths[number][b])} rows from row"
                    f" {int(first[b])}; it has {last}"
                )
        return torch.stack(lengths, dim=1)

    def base(self) -> Tensor:
        """B P: the table row at which each piece of each sample begins."""
        columns = []
        for number, piece in enumerate(self.pieces):
            first = self._start(number) + self.sources[self._source_of[number]].first_row
            if piece.kind != "constant":
                first = first + torch.arange(self.batch, device=first.device) * self._num_rows[number]
            columns.append(first)
        return torch.stack(columns, dim=1)

    def padded_length(self, lengths_B: Tensor, max_length: int | None) -> int:
        """L; a sequence that does not fit into `max_length` is an error where lengths can be read."""
        if max_length is None:
            return int(lengths_B.max()) if self.batch else 0
        if self.on_host and self.batch and int(lengths_B.max()) > max_length:
            b = int(lengths_B.argmax())
            raise BadInput(f"sample {b} has {int(lengths_B[b])} rows, max_length is {max_length}")
        return max_length

    def to_device(self, *parts: Tensor) -> list[Tensor]:
        """What was computed on the host, beside the values; the copies overlap with the GPU's work."""
        if self.device.type != "cuda":
            return [part.to(self.device) for part in parts]
        return [
            part if part.is_cuda else part.pin_memory().to(self.device, non_blocking=True) for part in parts
        ]

    def build(
        self, index: Tensor, starts_PB: Tensor, lengths_B: Tensor, *, length: int, pad_value: float
    ) -> Tensor:
        """B L D: the rows that `index` names."""
        first_pieces = [self._source_of.index(number) for number in range(len(self.sources))]
        sources = [self.pieces[number].values for number in first_pieces]
        dtype = sources[0].dtype
        for source in sources[1:]:
            dtype = torch.promote_types(dtype, source.dtype)
        flat = gather.gather_rows(
            [source.to(dtype).reshape(-1, *self.item) for source in sources],
            index,
            pad_value=pad_value,
            layout=gather.Layout(sources=self.sources, starts=starts_PB, lengths=lengths_B, length=length),
        )
        return flat.view(self.batch, length, *self.item)
