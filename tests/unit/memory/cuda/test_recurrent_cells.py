"""Cells that a model calls step by step keep what CUDA's fused kernels keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.memory import under_rules

WIDTH, ROWS = 32, 16


def step(kind: type[nn.RNNCellBase], bias: bool) -> None:
    cell = kind(8, WIDTH, bias=bias)  # type: ignore[call-arg]
    x, state = torch.ones(ROWS, 8), torch.ones(ROWS, WIDTH)
    found = cell(x, (state, state))[0] if kind is nn.LSTMCell else cell(x, state)
    found.sum().backward()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "gates", "kept"), [(nn.LSTMCell, 4, 4), (nn.GRUCell, 3, 5)])
def test_a_cell_is_two_products_and_one_kernel(
    kind: type[nn.RNNCellBase], gates: int, kept: int, bias: bool
) -> None:
    made = under_rules(step, kind, bias)
    assert made.sizes_of("aten.mm")[:2] == [ROWS * WIDTH * gates * 4] * 2
    forward = [size for size in made.sizes_of("fused") if size > ROWS * WIDTH * 4]
    assert forward[0] == ROWS * WIDTH * kept * 4  # the workspace
    assert not made.sizes_of("aten.sigmoid")


def steps_under_autocast(count: int) -> None:
    cell, state = nn.GRUCell(WIDTH, WIDTH), torch.ones(ROWS, WIDTH)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(count):
                state = cell(torch.ones(ROWS, WIDTH), state)


def test_the_weights_of_a_cell_are_cast_once_until_autocast_ends() -> None:
    made = under_rules(steps_under_autocast, 3)
    assert made.sizes_of("_to_copy").count(3 * WIDTH * WIDTH * 2) == 2 * 2  # two weights, cast anew


@pytest.mark.parametrize("name", ["input_gates", "hidden_gates", "result1", "result2"])
def test_autograd_keeps_both_products_and_the_workspace(name: str) -> None:
    def gates(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta", requires_grad=True)

    made = torch.ops.aten._thnn_fused_lstm_cell(gates(2, 8), gates(2, 8), gates(2, 2), gates(8), gates(8))
    assert hasattr(made[0].grad_fn, f"_saved_{name}")
