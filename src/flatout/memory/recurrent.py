"""Recurrent layers as cuDNN runs them: one call for a stack, with a reserve kept for the backward.

The reserve holds the gates of every step (LSTM five, GRU six, plain one value per hidden unit) and the
outputs between layers; a workspace lives during each call.  Under autocast the weights are cast into one
flat buffer first.  Checked against allocations on an H200 (cuDNN 9.19); the workspace is approximate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

GATES_KEPT = {"lstm": 5, "gru": 6, "rnn": 1}
STEPS_IN_WORKSPACE = {"lstm": 5.5, "gru": 4.5, "rnn": 4.0}
WORKSPACE_PER_LAYER = 8_470_000
RESERVE_HEAD = 256


def install(library: torch.library.Library) -> None:
    for name, kind in (("lstm", "lstm"), ("gru", "gru"), ("rnn_tanh", "rnn"), ("rnn_relu", "rnn")):
        library.impl(f"{name}.input", _padded(kind), "AutogradCPU")
        library.impl(f"{name}.data", _packed(kind), "AutogradCPU")


def _padded(kind: str) -> Any:
    def run(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
        if batch_first:
            x = x.transpose(0, 1)
        output, *last = _Cudnn.apply(
            kind, num_layers, bidirectional, dropout if train else 0.0, len(states), x, *states, *_cast(params)
        )
        return (output.transpose(0, 1) if batch_first else output, *last)

    return run


def _packed(kind: str) -> Any:
    def run(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
        return _Cudnn.apply(
            kind, num_layers, bidirectional, dropout if train else 0.0, len(states), data, *states, *_cast(params)
        )

    return run


def _cast(params: Sequence[Tensor]) -> list[Tensor]:
    """Under autocast: all weights in one flat buffer of the lower precision."""
    if not torch.is_autocast_enabled("cpu"):
        return list(params)
    dtype = torch.get_autocast_dtype("cpu")
    if all(parameter.dtype is dtype for parameter in params):
        return list(params)
    return list(_Flat.apply(dtype, *params))


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *params: Tensor) -> Any:
        ctx.shapes = [(parameter.shape, parameter.dtype) for parameter in params]
        flat = torch.empty(sum(parameter.numel() for parameter in params), dtype=dtype)
        return _views(flat, [parameter.shape for parameter in params])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.shapes))


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    parts = flat.split([shape.numel() for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


class _Cudnn(torch.autograd.Function):
    """Allocates what cuDNN allocates; computes nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        num_layers: int,
        bidirectional: bool,
        dropout: float,
        num_states: int,
        x: Tensor,
        *rest: Tensor,
    ) -> Any:
        states, weights = rest[:num_states], rest[num_states:]
        dtype = weights[0].dtype
        directions, hidden = (2 if bidirectional else 1), states[0].shape[-1]
        x = x.to(dtype) if x.dtype is not dtype else x
        x = x.contiguous()
        lower = [state.to(dtype) for state in states]
        output = torch.empty((*x.shape[:-1], hidden * directions), dtype=dtype)
        last = [torch.empty(state.shape, dtype=dtype) for state in states]
        units = output.numel()
        workspace_bytes = int(
            sum(weight.numel() for weight in weights) * dtype.itemsize
            + WORKSPACE_PER_LAYER * num_layers * directions
            + STEPS_IN_WORKSPACE[kind] * units * dtype.itemsize
        )
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8)
        kept = units * (GATES_KEPT[kind] * num_layers + num_layers - 1) * dtype.itemsize
        masks = (num_layers - 1) * units // 8 if dropout else 0
        needs = any(ctx.needs_input_grad)
        reserve = torch.empty(kept + masks + RESERVE_HEAD, dtype=torch.uint8) if needs else None
        del workspace, lower
        ctx.save_for_backward(*([x, output, reserve, *states] if reserve is not None else []), *weights)
        ctx.num_kept = 3 + num_states
        ctx.workspace_bytes = workspace_bytes
        ctx.num_states = num_states
        return (output, *last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, _output, _reserve = ctx.saved_tensors[:3]
        states = ctx.saved_tensors[3 : ctx.num_kept]
        weights = ctx.saved_tensors[ctx.num_kept :]
        grad_x = torch.empty_like(x)
        grad_states = [torch.empty_like(state) for state in states]
        workspace = torch.empty(ctx.workspace_bytes, dtype=torch.uint8)
        del workspace
        flat = torch.empty(sum(weight.numel() for weight in weights), dtype=weights[0].dtype)
        workspace = torch.empty(ctx.workspace_bytes, dtype=torch.uint8)
        del workspace
        views = _views(flat, [weight.shape for weight in weights])
        return (None, None, None, None, None, grad_x, *grad_states, *views)
