"""One step of a stack of matrices from the noise of a population.

    U = unit * sum_k gains[k] expand[k]^T shrink[k];    master += lr * U;    weight = rounded master

U is one product of tall matrices, and belongs to the vendor's library.  What follows it is bound by bytes:
with whole operators U is read for its norm and for the sum, and the master again for its own norm and for the
rounding, 30 bytes a weight.  One kernel reads U and the master once, writes master and weight, and leaves the
squares of both norms: 14.

The product is in float16: int8 noise is exact in it, and a gain, at most 1, loses one part in 2,000, as it
would in TF32, which takes twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.engines.evolution.population.weights import Stack

BLOCK = 4096


@triton.jit(do_not_specialize=["unit", "lr"])
def move(
    addresses,  # [matrices, 2]: of the master [count] float32 and of the weight [count], the model's
    like,  # a tensor of the weights' type
    ascent,  # [matrices, count] float32: U without its unit
    squares,  # [matrices, programs, 3]: of U, of the move and of the moved master
    unit,
    lr,
    count,
    ROUNDED: tl.constexpr,  # whether the weight is a tensor of its own
    BLOCK: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    # Tensors begin at whole lines; without the hint every number would be a load of its own.
    master = tl.multiple_of(tl.load(addresses + 2 * matrix).to(tl.pointer_type(tl.float32)), 16)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    u = tl.load(ascent + matrix * count + at, mask=inside, other=0.0) * unit
    moved = tl.load(master + at, mask=inside, other=0.0) + lr * u
    tl.store(master + at, moved, mask=inside)
    if ROUNDED:
        element = like.dtype.element_ty
        weight = tl.load(addresses + 2 * matrix + 1).to(tl.pointer_type(element))
        tl.store(tl.multiple_of(weight, 16) + at, moved.to(element), mask=inside)
    out = squares + 3 * (matrix * tl.num_programs(0) + tl.program_id(0))
    square = tl.sum(u * u, axis=0)
    tl.store(out, square)
    tl.store(out + 1, lr * lr * square)
    tl.store(out + 2, tl.sum(moved * moved, axis=0))


def address_table(masters: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor | None:
    """Make the address table of a stack; None if a tensor has gaps or is not aligned to 16 bytes."""
    if any(not each.is_contiguous() or each.data_ptr() % 16 for each in (*masters, *weights)):
        return None
    rows = [(master.data_ptr(), weight.data_ptr()) for master, weight in zip(masters, weights, strict=True)]
    return torch.tensor(rows, dtype=torch.int64, device=masters[0].device)


def ascend(addresses: Tensor, stack: Stack, *, gains: Tensor, unit: float, lr: float, like: Tensor) -> Tensor:
    """Move a stack; return the squared norms of U, of the move and of the moved masters, [3].

    The stack's factors are int8, `gains` [variants] are float16, at most 1, and `like` is one of the weights.
    """
    # A factor is at most 127, so a thousand terms of two of them reach past float16: sums are float32.
    left = (stack.expand * gains[:, None, None]).flatten(1, 2)
    right = stack.shrink.flatten(1, 2).half()
    if like.is_cuda:
        ascent = torch.bmm(left.mT, right, out_dtype=torch.float32)
    else:
        ascent = left.mT.float() @ right.float()
    num, count = len(ascent), ascent.shape[1:].numel()
    programs = triton.cdiv(count, BLOCK)
    squares = torch.empty(num, programs, 3, device=ascent.device)
    move[(programs, num)](
        addresses, like, ascent, squares, unit, lr, count,
        ROUNDED=like.dtype != torch.float32, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return squares.sum(dim=(0, 1))
