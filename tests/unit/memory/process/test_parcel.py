"""What arrives of a job that is sent: its code by value, its tensors by their shape or by their values."""

from __future__ import annotations

import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flatout.ground.errors import BadInput
from flatout.memory.process.parcel import SMALL_BYTES, pack

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn]
LARGE = SMALL_BYTES // 4 + 1


def there_and_back(*values: Any, with_values: bool = False) -> Any:
    """What a Connection makes of the parcel on its other side."""
    _function, args = ForkingPickler.loads(pack(len, values, with_values=with_values))
    return args[0] if len(args) == 1 else args


def same_place(one: Tensor, other: Tensor) -> bool:
    kept = ("dtype", "shape", "requires_grad", "device")
    return one.stride() == other.stride() and all(getattr(one, name) == getattr(other, name) for name in kept)


@given(st.data())
def test_small_tensors_arrive_as_they_are(data: st.DataObject) -> None:
    size = data.draw(st.lists(st.integers(0, 4), max_size=4))
    order = data.draw(st.permutations(range(len(size))))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensor = torch.randint(0, 2, [2, *size])[1].to(dtype).permute(order)
    if data.draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    if dtype.is_floating_point and data.draw(st.booleans()):
        tensor = tensor.detach().requires_grad_()
    made = there_and_back(tensor)
    assert same_place(made, tensor)
    assert made.to(torch.complex64).equal(tensor.to(torch.complex64))


def test_large_weights_are_sent_without_their_data() -> None:
    weight = nn.Parameter(torch.empty(1 << 15, 1 << 13).t(), requires_grad=False)  # 1 GiB that nobody touched
    before = psutil.Process().memory_info().rss
    assert len(pack(len, (weight,))) < 1000
    made = there_and_back(weight)
    assert psutil.Process().memory_info().rss - before < 1 << 28
    assert isinstance(made, nn.Parameter) and same_place(made, weight)
    assert not made[::1000, ::1000].any()


def test_large_integers_and_weights_of_a_real_run_keep_their_values() -> None:
    tokens, weight = torch.randint(0, 1000, (LARGE,)), torch.randn(LARGE)
    got_tokens, got_weight = there_and_back(tokens, weight)
    assert got_tokens.equal(tokens) and not got_weight.any()
    got_weight, _ = there_and_back(weight, tokens, with_values=True)
    assert got_weight.equal(weight)


def test_a_model_keeps_its_ties_its_kinds_and_the_attributes_of_its_tensors() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(LARGE, 2)
            self.head = nn.Linear(2, LARGE)
            self.head.weight = self.table.weight
            self.register_buffer("scale", torch.full((2,), 3.0))
            self.head.bias.owner = self  # type: ignore[attr-defined]

    model = there_and_back(Net())
    assert model.head.weight is model.table.weight
    assert [name for name, _ in model.named_parameters()] == ["table.weight", "head.bias"]
    assert [type(buffer) for buffer in model.buffers()] == [Tensor]
    assert model.scale.tolist() == [3.0, 3.0]
    assert model.head.bias.owner is model


def test_a_model_without_data_stays_without() -> None:
    (weight, bias) = there_and_back(nn.Linear(3, 2, device="meta")).parameters()
    assert weight.is_meta and bias.is_meta and tuple(weight.shape) == (2, 3)


def test_functions_arrive_with_what_they_close_over() -> None:
    width = 3
    made = there_and_back(lambda x: x * width)
    assert made(2) == 6


def test_what_cannot_be_sent_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match="cannot be sent to another process: cannot pickle") as caught:
        pack(len, (threading.Lock(),))
    assert "\n" not in str(caught.value)
