"""One step of a matrix from the noise of a population, in one pass over the matrix.

    U = unit * sum_k gains[k] expand[k]^T shrink[k];    master += lr * U;    weight = rounded master

With whole operators U is written, read for its norm, read for the sum, and the master read again for its own
norm and for the rounding: 34 bytes a weight where 10 have to move.  Here a program holds a tile of U in
registers, moves the master and the model's weight, and leaves the squares of both norms.

The products are in float16: int8 noise is exact in it, and a gain, at most 1, loses one part in 2,000, as it
would in TF32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

OUT, IN, TERMS, GROUP = 128, 128, 64, 8


@triton.jit(do_not_specialize=["lr"])
def move(
    master,  # [out, in] float32
    weight,  # [out, in], the model's
    expand,  # [terms, out] int8
    shrink,  # [terms, in] int8
    gains,  # [terms // RANK], at most 1
    unit,  # [1]: what the sum is multiplied with
    squares,  # [programs, 2]: of U and of the moved master
    lr,
    num_terms,
    num_out,
    num_in,
    RANK: tl.constexpr,
    ROUNDED: tl.constexpr,  # whether the weight is a tensor of its own
    OUT: tl.constexpr,
    IN: tl.constexpr,
    TERMS: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that run together take neighbouring tiles, so that factors are read from the cache.
    tiles_in = tl.cdiv(num_in, IN)
    band = tl.program_id(0) // (GROUP * tiles_in)
    height = tl.minimum(tl.cdiv(num_out, OUT) - band * GROUP, GROUP)
    tile = tl.program_id(0) % (GROUP * tiles_in)
    out = (band * GROUP + tile % height) * OUT + tl.arange(0, OUT)
    column = (tile // height) * IN + tl.arange(0, IN)
    term = tl.arange(0, TERMS)
    total = tl.zeros([OUT, IN], tl.float32)
    for start in range(0, num_terms, TERMS):
        inside = start + term < num_terms
        gain = tl.load(gains + (start + term) // RANK, mask=inside, other=0.0)
        at = (start + term).to(tl.int64)[:, None]
        left = tl.load(
            expand + at * num_out + out[None, :], mask=inside[:, None] & (out < num_out)[None, :], other=0
        )
        right = tl.load(
            shrink + at * num_in + column[None, :], mask=inside[:, None] & (column < num_in)[None, :], other=0
        )
        scaled = (left.to(tl.float32) * gain[:, None]).to(tl.float16)
        total = tl.dot(tl.trans(scaled), right.to(tl.float16), total)
    total *= tl.load(unit)
    place = out.to(tl.int64)[:, None] * num_in + column[None, :]
    valid = (out < num_out)[:, None] & (column < num_in)[None, :]
    moved = tl.load(master + place, mask=valid, other=0.0) + lr * total
    tl.store(master + place, moved, mask=valid)
    if ROUNDED:
        tl.store(weight + place, moved.to(weight.dtype.element_ty), mask=valid)
    tl.store(squares + 2 * tl.program_id(0), tl.sum(tl.sum(total * total, axis=1), axis=0))
    moved = tl.where(valid, moved, 0.0)
    tl.store(squares + 2 * tl.program_id(0) + 1, tl.sum(tl.sum(moved * moved, axis=1), axis=0))


def ascend(
    master: Tensor, weight: Tensor, *, expand: Tensor, shrink: Tensor, gains: Tensor, unit: Tensor, lr: float
) -> Tensor:
    """Move master and weight [out, in]; the squares of the norms of U and of the moved master, [2].

    `expand` [variants, rank, out] and `shrink` [variants, rank, in] are int8, `gains` [variants] at most 1.
    """
    num_out, num_in = master.shape
    rank = expand.shape[1]
    programs = triton.cdiv(num_out, OUT) * triton.cdiv(num_in, IN)
    squares = torch.empty(programs, 2, device=master.device)
    move[(programs,)](
        master,
        weight,
        expand,
        shrink,
        gains,
        unit,
        squares,
        lr,
        expand.shape[0] * rank,
        num_out,
        num_in,
        RANK=rank,
        ROUNDED=weight.data_ptr() != master.data_ptr(),
        OUT=OUT,
        IN=IN,
        TERMS=TERMS,
        GROUP=GROUP,
        num_warps=8,
        num_stages=3,
    )
    return squares.sum(dim=0)
