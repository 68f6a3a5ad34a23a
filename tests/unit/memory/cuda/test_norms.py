"""Norms copy what CUDA's kernels do not read as it lies, and nothing else."""

from __future__ import annotations

import warnings

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


def test_a_norm_of_root_mean_squares_keeps_its_input_and_a_number_for_each_row() -> None:
    """As recorded of a decoder and of a state space; on the CPU a product beside."""

    def kept(dtype: torch.dtype) -> list[str]:
        def call() -> None:
            with warnings.catch_warnings():  # PyTorch says that it leaves its kernel
                warnings.simplefilter("ignore", UserWarning)
                nn.RMSNorm(64)(torch.empty(8, 128, 64, dtype=dtype, requires_grad=True))

        made = under_rules(call)
        return [each.op for each in made.storages if each.num_bytes == 8 * 128 * 64 * dtype.itemsize]

    assert kept(torch.float32) == ["aten.empty.memory_format", "aten.native_layer_norm.default"]
    # a weight in another type leaves the kernel
    assert "aten.native_layer_norm.default" not in kept(torch.bfloat16)


def test_a_norm_of_root_mean_squares_has_the_gradients_it_is_asked_for() -> None:
    def call(trained: bool) -> tuple[bool, bool]:
        norm = nn.RMSNorm(64, elementwise_affine=trained)
        x = torch.empty(8, 64, requires_grad=True)
        norm(x).sum().backward()
        return x.grad is not None, all(weight.grad is not None for weight in norm.parameters())

    assert under_rules(call, True).result == under_rules(call, False).result == (True, True)
