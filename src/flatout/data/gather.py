"""One gather over the rows of several tensors, and its gradient without a sum.

Forward, the tensors are laid end to end and each output row is one table row.  Backward, autograd's own
answer is an addition per output row: atomic, in no fixed order, and all padding rows queue for the same
address.  But where no row is used twice nothing has to be added: the gradient is the same rows copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def gather_rows(sources: Sequence[Tensor], index: Tensor, *, pad_value: float) -> Tensor:
    """The rows `index` names, of `sources` laid end to end with a row of `pad_value` after the last.

    `index` may name the last row, the padding, any number of times and every other row once.
    """
    padding = sources[0].new_full((1, *sources[0].shape[1:]), pad_value)
    if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
        found: Tensor = _Gather.apply(index, *sources, padding)  # type: ignore[no-untyped-call]
        return found
    return _table([*sources, padding]).index_select(0, index)


def _table(sources: Sequence[Tensor]) -> Tensor:
    """All rows end to end; small tensors first among themselves.

    Shared rows come as expanded views, and one such view takes torch's fast copy from all the others.
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
