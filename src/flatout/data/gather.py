"""One gather over the rows of several tensors, and its gradient without a sum per row.

Forward, the tensors are laid end to end and each output row is one table row.  Backward, autograd's own
answer is an addition per output row: atomic, in no fixed order, and all padding rows and shared rows queue
for the same address.  But a row that is used once needs no addition, its gradient is a copy; only rows
that all samples share (special tokens) are sums, and those are summed apart.  Both are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where the rows of one tensor lie in the table; `pieces` is empty unless all samples share them."""

    first_row: int
    num_rows: int
    pieces: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which rows of the output belong to which piece; what the gradient of shared rows needs."""

    sources: Sequence[Source]
    starts: Tensor  # P B: where each piece begins in its sequence
    lengths: Tensor  # B
    length: int  # L


def expand(parts: Tensor, *, num_rows: int, last_row: int) -> Tensor:
    """The index of consecutive parts: `parts` holds for each its table row less its place, and its length.

    Rows of the last part would run past the table's end; it is one row, repeated.
    """
    offsets = torch.repeat_interleave(parts[0], parts[1], output_size=num_rows)
    return offsets.add_(torch.arange(num_rows, device=parts.device)).clamp_(max=last_row)


def gather_rows(sources: Sequence[Tensor], index: Tensor, *, pad_value: float, layout: Layout) -> Tensor:
    """The rows `index` names, of `sources` laid end to end with a row of `pad_value` after the last."""
    if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
        found: Tensor = _Gather.apply(index, pad_value, layout, *sources)  # type: ignore[no-untyped-call]
        return found
    return _table(sources, pad_value).index_select(0, index)


def _table(sources: Sequence[Tensor], pad_value: float) -> Tensor:
    padding = sources[0].new_full((1, *sources[0].shape[1:]), pad_value)
    return torch.cat([*sources, padding])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, pad_value: float, layout: Layout, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(index, layout.starts, layout.lengths)
        ctx.sources, ctx.length = layout.sources, layout.length
        return _table(sources, pad_value).index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        index, starts_PB, lengths_B = ctx.saved_tensors
        wanted: Sequence[bool] = ctx.needs_input_grad[3:]
        last = ctx.sources[-1]
        found: list[Tensor | None] = [None] * len(wanted)
        if any(wants and not source.pieces for wants, source in zip(wanted, ctx.sources, strict=True)):
            # padding and shared rows write here too, last one wins, and nobody reads what they leave
            rows = grad.new_zeros(last.first_row + last.num_rows + 1, *grad.shape[1:])
            rows.index_copy_(0, index, grad)
            for number, source in enumerate(ctx.sources):
                found[number] = rows[source.first_row : source.first_row + source.num_rows]
        shared = [n for n, source in enumerate(ctx.sources) if source.pieces and wanted[n]]
        for number, total in zip(shared, _shared(ctx, shared, grad, starts_PB, lengths_B), strict=True):
            found[number] = total
        return (None, None, None, *(g if wants else None for g, wants in zip(found, wanted, strict=True)))


def _shared(
    ctx: FunctionCtx, shared: Sequence[int], grad: Tensor, starts_PB: Tensor, lengths_B: Tensor
) -> list[Tensor]:
    """Gradients of rows that all samples share: over all samples and all pieces that show them."""
    if not shared or not grad.numel():
        return [grad.new_zeros(ctx.sources[n].num_rows, *grad.shape[1:]) for n in shared]  # type: ignore[attr-defined]
    sources: Sequence[Source] = ctx.sources  # type: ignore[attr-defined]
    length: int = ctx.length  # type: ignore[attr-defined]
    ends_PB = torch.cat([starts_PB[1:], lengths_B[None]])
    blocks = [(sources[number], piece) for number in shared for piece in sources[number].pieces]
    pieces_K = [piece for source, piece in blocks for _ in range(source.num_rows)]
    rows_K = [row for source, _ in blocks for row in range(source.num_rows)]
    origin_B = torch.arange(starts_PB.size(1), device=grad.device) * length
    places_KB = torch.stack([starts_PB[p] + r for p, r in zip(pieces_K, rows_K, strict=True)])
    there_KB = places_KB < torch.stack([ends_PB[p] for p in pieces_K])
    chosen = grad.index_select(0, (places_KB.clamp(max=length - 1) + origin_B).flatten())
    chosen_KBD = chosen.view(*places_KB.shape, -1) * there_KB[..., None]
    totals_KD = chosen_KBD.sum(1)
    found, first = [], 0
    for number in shared:
        source = sources[number]
        count = source.num_rows * len(source.pieces)
        total = totals_KD[first : first + count].view(len(source.pieces), source.num_rows, -1).sum(0)
        found.append(total.view(source.num_rows, *grad.shape[1:]))
        first += count
    return found
