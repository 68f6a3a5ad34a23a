"""One step of a matrix from the noise of a population.

    U = unit * sum_k gains[k] expand[k]^T shrink[k];    master += lr * U;    weight = rounded master

U is one product of tall matrices, and belongs to the vendor's library.  What follows it is bound by bytes:
with whole operators U is read for its norm and for the sum, and the master again for its own norm and for the
rounding, 30 bytes a weight.  One kernel reads U and the master once, writes master and weight, and leaves the
squares of both norms: 14.

The product is in float16: int8 noise is exact in it, and a gain, at most 1, loses one part in 2,000, as it
would in TF32, which takes twice as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 4096


@triton.jit(do_not_specialize=["unit", "lr"])
def move(
    master,  # [count] float32
    weight,  # [count], the model's
    ascent,  # [count] float32: U without its unit
    squares,  # [programs, 2]: of U and of the moved master
    unit,
    lr,
    count,
    ROUNDED: tl.constexpr,  # whether the weight is a tensor of its own
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    u = tl.load(ascent + at, mask=inside, other=0.0) * unit
    moved = tl.load(master + at, mask=inside, other=0.0) + lr * u
    tl.store(master + at, moved, mask=inside)
    if ROUNDED:
        tl.store(weight + at, moved.to(weight.dtype.element_ty), mask=inside)
    tl.store(squares + 2 * tl.program_id(0), tl.sum(u * u, axis=0))
    tl.store(squares + 2 * tl.program_id(0) + 1, tl.sum(moved * moved, axis=0))


def ascend(
    master: Tensor, weight: Tensor, *, expand: Tensor, shrink: Tensor, gains: Tensor, unit: float, lr: float
) -> Tensor:
    """Move master and weight [out, in]; the squares of the norms of U and of the moved master, [2].

    `expand` [variants, rank, out] and `shrink` [variants, rank, in] are int8, `gains` [variants] at most 1.
    """
    # A factor is at most 127, so a thousand terms of two of them reach past float16: sums are float32.
    left = expand.half().mul_(gains.half()[:, None, None]).flatten(0, 1)
    right = shrink.half().flatten(0, 1)
    if master.is_cuda:
        ascent = torch.mm(left.T, right, out_dtype=torch.float32)
    else:
        ascent = left.T.float() @ right.float()
    programs = triton.cdiv(master.numel(), BLOCK)
    squares = torch.empty(programs, 2, device=master.device)
    move[(programs,)](
        master, weight, ascent, squares, unit, lr, master.numel(),
        ROUNDED=weight.data_ptr() != master.data_ptr(), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return squares.sum(dim=0)
