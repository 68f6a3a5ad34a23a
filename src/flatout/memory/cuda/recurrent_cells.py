"""Recurrent cells as CUDA runs them: two products, and one kernel for everything after them.

The CPU computes gate by gate and keeps each.  On CUDA the kernel of `nn.LSTMCell` and `nn.GRUCell` keeps a
workspace (four values per unit, five of a GRU), and autograd keeps both products too, in case the gradient is
differentiated again.  From PyTorch's source: `RNN.cpp`, `RNN.cu` and `derivatives.yaml`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten
GRU_WORKSPACE = 5  # values per unit


def install(library: torch.library.Library) -> None:
    library.impl("lstm_cell", _lstm_cell, "AutogradCPU")
    library.impl("gru_cell", _gru_cell, "AutogradCPU")
    answer(library)


def answer(library: torch.library.Library) -> None:
    """Answer for cells without data what PyTorch does not know, or knows only if they have biases."""
    library.impl("_thnn_fused_lstm_cell", _lstm_forward, "Meta", allow_override=True)
    library.impl("_thnn_fused_gru_cell", _gru_forward, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _gru_backward, "Meta")


def _lstm_cell(
    x: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    products = torch.matmul(x, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    hidden, state, _workspace = aten._thnn_fused_lstm_cell(*products, hx[1], *biases)
    return hidden, state


def _gru_cell(x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, *biases: Tensor | None) -> Tensor:
    products = torch.matmul(x, w_ih.t()), torch.matmul(hx, w_hh.t())
    hidden: Tensor = aten._thnn_fused_gru_cell(*products, hx, *biases)[0]
    return hidden


def _lstm_forward(
    input_gates: Tensor,
    _hidden_gates: Tensor,
    cx: Tensor,
    *_biases: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    contiguous = torch.contiguous_format
    workspace = torch.empty_like(input_gates, memory_format=contiguous)
    hidden, state = (torch.empty_like(cx, memory_format=contiguous) for _ in range(2))
    return hidden, state, workspace


def _gru_forward(
    _input_gates: Tensor, _hidden_gates: Tensor, hx: Tensor, *_biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], GRU_WORKSPACE * hx.shape[1])


def _gru_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    width = 3 * (workspace.shape[1] // GRU_WORKSPACE)
    gates = [workspace.new_empty(workspace.shape[0], width) for _ in range(2)]
    biases = [workspace.new_empty(width) if has_bias else None for _ in range(2)]
    return gates[0], gates[1], torch.empty_like(grad_hy), biases[0], biases[1]
