"""Quick fake tensors give what PyTorch's own give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.memory.trace.fake_mode import QuickFakeMode

Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]


def shape_of(x: Tensor) -> Shape:
    return tuple(x.shape), tuple(x.stride()), x.dtype, x.untyped_storage().nbytes()


def computed(mode: FakeTensorMode) -> list[Shape]:
    """Operations of several kinds, each twice, so that the second is remembered."""
    found = []
    with mode:
        for _ in range(2):
            x = torch.empty(4, 8, 16, requires_grad=True)
            turned = x.transpose(1, 2)
            found += [
                shape_of(each)
                for each in (
                    x + 1,
                    x.long() + 1,
                    x.long() + 1.0,
                    turned.contiguous(),
                    turned.clone(),
                    x[:, 2:].exp(),
                    torch.cat([x, x.detach()], dim=-1),
                    F.layer_norm(x, (16,)),
                    nn.Linear(16, 5)(x),
                    x.to(torch.bfloat16),
                    x.to(dtype=torch.float64, memory_format=torch.contiguous_format),
                    torch.zeros(3, dtype=torch.int8),
                    x.topk(3)[1],
                )
            ]
            x.sum().backward()
            assert x.grad is not None
            found.append(shape_of(x.grad))
    return found


def test_it_computes_what_plain_fake_tensors_compute() -> None:
    assert computed(QuickFakeMode()) == computed(FakeTensorMode())


@pytest.mark.parametrize("scalar", [1, 1.0, True])
def test_numbers_that_are_equal_are_not_confused(scalar: Any) -> None:
    with QuickFakeMode():
        x = torch.empty(3, dtype=torch.uint8)
        kinds = [(x * number).dtype for number in (1, 1.0, scalar)]
    expected = [torch.uint8, torch.float32, (torch.zeros(3, dtype=torch.uint8) * scalar).dtype]
    assert kinds == expected


def test_a_constant_is_left_to_pytorch() -> None:
    with QuickFakeMode():
        one = torch.tensor(1)
        assert one.constant is not None  # type: ignore[attr-defined]
        assert [(one + number).item() for number in (1, 2)] == [2, 3]
        assert (torch.empty(4) * torch.tensor(2.0)).shape == (4,)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_the_copy_of_a_tensor_belongs_to_the_same_mode() -> None:
    """A copied mode frees the storages that it remembers a second time."""
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    with mode:
        copied = copy.deepcopy(nn.Linear(4, 4))
    assert copy.deepcopy(mode) is mode
    assert all(parameter.fake_mode is mode for parameter in copied.parameters())
