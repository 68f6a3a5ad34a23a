"""Norms copy what CUDA's kernels do not read as it lies, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.memory import under_rules

SHAPE = (4, 8, 6, 10)
NUM_BYTES = 4 * 8 * 6 * 10 * 4


def step(norm: nn.Module, order: str, dtype: torch.dtype) -> None:
    x = torch.ones(SHAPE, dtype=dtype, requires_grad=True)
    if order == "channels last":
        x = torch.ones(SHAPE, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
    elif order == "transposed":
        x = torch.ones(4, 60, 8, dtype=dtype, requires_grad=True).transpose(1, 2)
    found = norm(x)
    (found * found).sum().backward()


def copies(norm: nn.Module, order: str, dtype: torch.dtype = torch.float32) -> int:
    made = under_rules(step, norm, order, dtype)
    return made.sizes_of("aten.clone").count(NUM_BYTES * dtype.itemsize // 4)


@pytest.mark.parametrize(("order", "expected"), [("usual", 0), ("channels last", 0)])
def test_a_batch_norm_reads_images_in_both_orders(order: str, expected: int) -> None:
    assert copies(nn.BatchNorm2d(8), order) == expected


def test_a_batch_norm_of_a_transposed_sequence_keeps_a_copy_except_in_bfloat16() -> None:
    assert copies(nn.BatchNorm1d(8), "transposed") == 1
    assert copies(nn.BatchNorm1d(8).to(torch.bfloat16), "transposed", torch.bfloat16) == 0
    assert copies(nn.BatchNorm1d(8, affine=False), "transposed") == 0


@pytest.mark.parametrize(("order", "expected"), [("usual", 0), ("channels last", 1)])
def test_a_group_norm_reads_the_usual_order_alone(order: str, expected: int) -> None:
    assert copies(nn.GroupNorm(2, 8), order) == expected
