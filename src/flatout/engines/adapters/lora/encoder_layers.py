"""The layers of BERT-like encoders, called without what Hugging Face's modules do around them.

A step that is not recorded is bound by the host.  Half of a layer's time there goes to modules that call
modules, look up signatures and turn query, key and value from tokens to heads and back, for the same dozen
operators: attention, a norm, two linear maps around an activation, a norm.  Here these are called one after
another on packed tokens [N, width].  They are the model's own modules, adapted or not.  Only families with
exactly this layer are read; `encoder` compares the states with the model's own.

A residual add and the norm of the sum are one function.  As two operators the sum is written and read again,
and backwards a third adds up the gradients of the states' two readers, the next map and the next residual
add.  On a GPU one kernel does each side (`add_norm_kernel`), in a step that is recorded or whose kernels
outlast their launches; elsewhere operators cost the host less.

Shapes: N tokens, H heads, D width of a head, W width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from subprocess import CalledProcessError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flatout.engines.adapters.lora.attention import RowBounds, attend
from flatout.multiplex.kernels import HAS_TRITON
from flatout.multiplex.products.side_stream import is_bound_by_device

FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert")
WIDEST = 8192  # a row that a program's registers hold


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderLayer:
    """One layer, as its parts."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    mix: nn.Linear  # of the heads
    mix_norm: nn.LayerNorm
    widen: nn.Linear
    activation: Callable[[Tensor], Tensor]
    narrow: nn.Linear
    narrow_norm: nn.LayerNorm
    num_heads: int
    scaling: float

    def __call__(self, x_NW: Tensor, residual_NW: Tensor, bounds: RowBounds) -> tuple[Tensor, Tensor]:
        """Return the states after this layer, for its two readers: the next layer's maps and residual add.

        `forward` of a linear map may be an adapted one.
        """
        shape = len(x_NW), self.num_heads, -1
        seen_NHD = attend(
            self.query.forward(x_NW).view(shape),
            self.key.forward(x_NW).view(shape),
            self.value.forward(x_NW).view(shape),
            bounds,
            scaling=self.scaling,
        )
        mixed_NW = self.mix.forward(seen_NHD.reshape(x_NW.shape))
        y_NW, residual_NW = added_norm(self.mix_norm, mixed_NW, residual_NW)
        wide = self.activation(self.widen.forward(y_NW))
        return added_norm(self.narrow_norm, self.narrow.forward(wide), residual_NW)


def layers_of(model: Any) -> tuple[EncoderLayer, ...] | None:
    """Return the layers of a model, first to last; None for another family."""
    config = model.config
    is_known = config.model_type in FAMILIES and not getattr(config, "is_decoder", False)
    if not is_known or getattr(config, "position_embedding_type", "absolute") != "absolute":
        return None
    return tuple(_layer(layer) for layer in model.encoder.layer)


def _layer(layer: Any) -> EncoderLayer:
    heads = layer.attention.self
    return EncoderLayer(
        query=heads.query,
        key=heads.key,
        value=heads.value,
        mix=layer.attention.output.dense,
        mix_norm=layer.attention.output.LayerNorm,
        widen=layer.intermediate.dense,
        activation=layer.intermediate.intermediate_act_fn,
        narrow=layer.output.dense,
        narrow_norm=layer.output.LayerNorm,
        num_heads=heads.num_attention_heads,
        scaling=heads.attention_head_size**-0.5,
    )


class NormKernels(NamedTuple):
    """The two functions of `add_norm_kernel`."""

    forward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    backward: Callable[..., Tensor]


def added_norm(norm: nn.LayerNorm, branch_NW: Tensor, residual_NW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum twice, once per reader, so that their gradients are not summed first."""
    if branch_NW.is_cuda and norm.elementwise_affine:
        kernels = _kernels(branch_NW.device, branch_NW.dtype, branch_NW.shape[1])
        if kernels is not None and is_bound_by_device(branch_NW):
            return add_and_norm(norm, branch_NW, residual_NW, kernels)
    normed: Tensor = norm.forward(branch_NW + residual_NW)
    return normed, normed


def add_and_norm(
    norm: nn.LayerNorm, branch_NW: Tensor, residual_NW: Tensor, kernels: NormKernels
) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum twice, computed by one kernel each way."""
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
    """Compile the kernels for this width with a first row; None where that fails."""
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
