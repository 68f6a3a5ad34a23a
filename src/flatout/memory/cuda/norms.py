"""The copies that CUDA makes before it normalises, and the CPU does not.

cuDNN's batch norm, which PyTorch takes for three dimensions and more unless they are bfloat16, reads what is
dense in the usual order or channels last; anything else (a transposed sequence) is copied first, and the copy
is what is kept for the backward.  A group norm on CUDA reads the usual order alone, so that channels last are
copied, and its result lies in the usual order.  A norm of root mean squares is one kernel on CUDA, which
keeps its input and a number for each row, where the CPU keeps the product before the weight as well; a
weight in another type than the input leaves that kernel.  From PyTorch's source: `Normalization.cpp`,
`group_norm.cpp`, `layer_norm.cpp`, `layer_norm_kernel.cu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten
MOST_SAMPLES = 880_801  # in training, and in evaluation:
MOST_EVALUATED = 65_535


def install(library: torch.library.Library) -> None:
    library.impl("batch_norm", _batch_norm, "AutogradCPU")
    library.impl("group_norm", _group_norm, "AutogradCPU")
    library.impl("rms_norm", _rms_norm, "AutogradCPU")


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    statistics = (running_mean is None) + (running_var is None)
    known = statistics == 0 or (statistics == 2 and training)
    most = MOST_SAMPLES if training else MOST_EVALUATED
    affine = weight is not None and bias is not None and weight.dtype is not torch.bfloat16
    if _by_cudnn(x) and affine and known and x.shape[0] <= most:
        x = x.contiguous(memory_format=suggest_memory_format(x))
    rest = (weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    return _composite(aten.batch_norm.default, x, *rest)


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    rest = (num_groups, weight, bias, eps, cudnn_enabled)
    return _composite(aten.group_norm.default, x.contiguous(), *rest)


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    is_alike = weight is None or weight.dtype is x.dtype
    if not is_alike or x.is_complex() or suggest_memory_format(x) is not torch.contiguous_format:
        return _composite(aten.rms_norm.default, x, normalized_shape, weight, eps)
    apply: Any = _RmsNorm.apply
    result: Tensor = apply(x, list(normalized_shape), weight)
    return result


class _RmsNorm(torch.autograd.Function):
    """Allocates what CUDA's kernel does: it is that of a layer norm without a mean; computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None) -> Any:
        result, _mean, scale = aten.native_layer_norm(x, shape, weight, None, 0.0)
        ctx.shape, ctx.has_weight = shape, weight is not None
        ctx.save_for_backward(x, scale, *([weight] if weight is not None else []))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, scale, *weights = ctx.saved_tensors
        weight = weights[0] if ctx.has_weight else None
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], False]
        found = aten.native_layer_norm_backward(grads[0], x, ctx.shape, scale, scale, weight, None, wanted)
        return found[0], None, found[1]


def batch_norm_backward_copy(args: Any, kwargs: Any) -> tuple[tuple[int, ...], ...]:
    """Return a copy of the gradient in the input's memory order, for cuDNN."""
    gradient, x = args[0], args[1]
    if not _by_cudnn(x) or gradient.is_contiguous(memory_format=suggest_memory_format(x)):
        return ()
    return ((gradient.nbytes,),)


def _by_cudnn(x: Tensor) -> bool:
    return x.dim() >= 3 and x.dtype in (torch.float32, torch.float16)


def _composite(op: Any, *args: Any) -> Tensor:
    result: Tensor = op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)
    return result
