"""Residual add and layer norm in one kernel, and its derivative with the sum of two gradients in one.

Both are bound by the bytes they move.  Forwards, the sum is written for the backward but not read again.
Backwards, the states after a norm have two readers, the next map and the next residual add; their gradients
are added where they are read.  A program does one row; sums are in float32.

The norm's own weights are frozen: they have no gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_norm_forward(
    branch,  # [N, WIDTH] each
    residual,
    weight,  # [WIDTH]
    bias,
    total,  # [N, WIDTH], written
    normed,
    mean,  # [N] float32, written
    rstd,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = row * WIDTH + columns
    x = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(total.dtype.element_ty)  # the backward sees this one: so must the norm
    tl.store(total + at, rounded, mask=inside)
    x = rounded.to(tl.float32)
    centre = tl.sum(x, 0) / WIDTH
    away = tl.where(inside, x - centre, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(away * away, 0) / WIDTH + eps)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (away * scale * w + b).to(normed.dtype.element_ty), mask=inside)
    tl.store(mean + row, centre)
    tl.store(rstd + row, scale)


@triton.jit
def add_norm_backward(
    first,  # [N, WIDTH]: the gradients of the two readers
    second,  # read if BOTH
    total,  # [N, WIDTH]
    mean,  # [N]
    rstd,
    weight,  # [WIDTH]
    gradient,  # [N, WIDTH], written
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BOTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = row * WIDTH + columns
    g = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    if BOTH:
        g += tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(rstd + row)
    unit = tl.where(inside, (x - tl.load(mean + row)) * scale, 0.0)
    g *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(g * unit, 0) / WIDTH
    level = tl.sum(g, 0) / WIDTH
    tl.store(gradient + at, ((g - unit * along - level) * scale).to(gradient.dtype.element_ty), mask=inside)


def forward(
    branch: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum, its norm, and each row's mean and inverse deviation; operands are contiguous."""
    num, width = branch.shape
    total, normed = torch.empty_like(branch), torch.empty_like(branch)
    mean, rstd = (torch.empty(num, device=branch.device) for _ in range(2))
    add_norm_forward[(num,)](
        branch, residual, weight, bias, total, normed, mean, rstd, eps,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    return total, normed, mean, rstd


def backward(
    first: Tensor, second: Tensor | None, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> Tensor:
    """Return the gradient to the sum, from one reader's gradient or from two."""
    num, width = total.shape
    gradient = torch.empty_like(total)
    add_norm_backward[(num,)](
        first, first if second is None else second, total, mean, rstd, weight, gradient,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), BOTH=second is not None, num_warps=_warps(width),
    )  # fmt: skip
    return gradient


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8
