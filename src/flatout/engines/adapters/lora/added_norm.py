"""A branch added to the residual stream, and the norm of the sum.

As two operators the sum is written and read again, and backwards a third adds up the gradients of the states'
two readers, the next map and the next residual add.  On a GPU one kernel does each side (`kernels.add_norm`),
in a step that is recorded or whose kernels outlast their launches; elsewhere operators cost the host less.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from subprocess import CalledProcessError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flatout.multiplex.kernels import HAS_TRITON
from flatout.multiplex.products.side_stream import is_bound_by_device

WIDEST = 8192  # a row that a program's registers hold


class NormKernels(NamedTuple):
    """What `kernels.add_norm` has."""

    forward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    backward: Callable[..., Tensor]


def added_norm(norm: nn.LayerNorm, branch_NW: Tensor, residual_NW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum twice, once per reader, so that their gradients are not summed first."""
    if branch_NW.is_cuda and norm.elementwise_affine:
        kernels = _kernels(branch_NW.device, branch_NW.dtype, branch_NW.shape[1])
        if kernels is not None and is_bound_by_device(branch_NW):
            return fused(norm, branch_NW, residual_NW, kernels)
    normed: Tensor = norm.forward(branch_NW + residual_NW)
    return normed, normed


def fused(
    norm: nn.LayerNorm, branch_NW: Tensor, residual_NW: Tensor, kernels: NormKernels
) -> tuple[Tensor, Tensor]:
    """The same by these kernels."""
    pair: tuple[Tensor, Tensor] = _AddedNorm.apply(  # type: ignore[no-untyped-call]
        branch_NW, residual_NW, norm.weight, norm.bias, norm.eps, kernels
    )
    return pair


class _AddedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branch: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        kernels: NormKernels,
    ) -> tuple[Tensor, Tensor]:
        total, normed, mean, rstd = kernels.forward(
            branch.contiguous(), residual.contiguous(), weight, bias, eps
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.kernels = kernels
        return normed, normed.view_as(normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_readers: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [gradient.contiguous() for gradient in of_readers if gradient is not None]
        if not given:
            return (None,) * 6
        second = given[1] if len(given) > 1 else None
        gradient = ctx.kernels.backward(given[0], second, *ctx.saved_tensors)
        return gradient, gradient, None, None, None, None


@functools.cache
def _kernels(device: torch.device, dtype: torch.dtype, width: int) -> NormKernels | None:
    """The kernels, compiled for this width by a first row; None where they cannot be had."""
    if not HAS_TRITON or width > WIDEST or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    if device.index != torch.cuda.current_device():  # where triton launches
        return None
    from flatout.engines.adapters.lora import add_norm_kernel

    row, weight = (
        torch.ones(1, width, device=device, dtype=dtype),
        torch.ones(width, device=device, dtype=dtype),
    )
    try:
        total, normed, mean, rstd = add_norm_kernel.forward(row, row, weight, weight, 1e-5)
        add_norm_kernel.backward(normed, row, total, mean, rstd, weight)
        add_norm_kernel.backward(normed, None, total, mean, rstd, weight)
    except (RuntimeError, OSError, CalledProcessError):  # triton finds no C compiler, or no headers of Python
        return None
    return NormKernels(add_norm_kernel.forward, add_norm_kernel.backward)
