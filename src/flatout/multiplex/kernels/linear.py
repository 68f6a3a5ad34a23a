"""The low-rank correction token by token: what a decode step needs.

`shrink_tokens` reads x and the variant's shrink factors once and leaves gain * (x . shrink) of each token in
float32; `expand_tokens` reads y and the expand factors once and adds.  A row of gain 0 is neither read nor
written, so it keeps the bits of the plain product.  Factors may be int8 or any float type; sums are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

TILE = 4096  # numbers of a factor that a program holds at once: assumed


@triton.jit
def shrink_tokens(
    x,  # [rows * num_tokens, width]
    shrink,  # [variants, rank, width], with strides
    index,  # [rows]
    gain,  # [rows]
    coefficients,  # [rows * num_tokens, rank], written
    num_tokens,
    width,
    rank,
    stride_variant,
    stride_rank,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = token // num_tokens
    own = tl.load(gain + row)
    if own != 0:
        ranks = tl.arange(0, RANKS)
        columns = tl.arange(0, BLOCK)
        factor = shrink + tl.load(index + row) * stride_variant + ranks[:, None] * stride_rank
        total = tl.zeros([RANKS, BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            at = start + columns
            inside = at < width
            values = tl.load(x + token * width + at, mask=inside, other=0).to(tl.float32)
            tile = tl.load(factor + at[None, :], mask=inside[None, :] & (ranks < rank)[:, None], other=0)
            total += values[None, :] * tile.to(tl.float32)
        tl.store(coefficients + token * rank + ranks, tl.sum(total, 1) * own, mask=ranks < rank)


@triton.jit
def expand_tokens(
    y,  # [rows * num_tokens, width], updated in place
    expand,  # [variants, rank, width], with strides
    index,  # [rows]
    gain,  # [rows]
    coefficients,  # [rows * num_tokens, rank]
    num_tokens,
    width,
    rank,
    stride_variant,
    stride_rank,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = token // num_tokens
    if tl.load(gain + row) != 0:
        ranks = tl.arange(0, RANKS)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        factor = expand + tl.load(index + row) * stride_variant + ranks[:, None] * stride_rank
        tile = tl.load(factor + at[None, :], mask=inside[None, :] & (ranks < rank)[:, None], other=0)
        own = tl.load(coefficients + token * rank + ranks, mask=ranks < rank, other=0)
        here = y + token * width + at
        plain = tl.load(here, mask=inside, other=0).to(tl.float32)
        total = plain + tl.sum(own[:, None] * tile.to(tl.float32), 0)
        tl.store(here, total.to(y.dtype.element_ty), mask=inside)


def correct(y: Tensor, x: Tensor, *, shrink: Tensor, expand: Tensor, index: Tensor, gain: Tensor) -> None:
    """Add every row's correction to y [rows, ..., out] in place; y and x [rows, ..., in] are contiguous."""
    shrink, expand = (factor if factor.stride(2) == 1 else factor.contiguous() for factor in (shrink, expand))
    in_width, out_width, rank = x.shape[-1], y.shape[-1], shrink.shape[1]
    tokens = x.numel() // in_width
    num_tokens = tokens // x.shape[0]
    coefficients = torch.empty(tokens, rank, dtype=torch.float32, device=x.device)
    ranks = triton.next_power_of_2(rank)
    widest = max(16, TILE // ranks)
    block_in = min(triton.next_power_of_2(in_width), widest)
    block_out = min(triton.next_power_of_2(out_width), widest, 1024)
    shared = (index, gain, coefficients, num_tokens)
    shrink_tokens[(tokens,)](
        x, shrink, *shared, in_width, rank, *shrink.stride()[:2], RANKS=ranks, BLOCK=block_in
    )
    expand_tokens[(tokens, triton.cdiv(out_width, block_out))](
        y, expand, *shared, out_width, rank, *expand.stride()[:2], RANKS=ranks, BLOCK=block_out
    )
