from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flatout.measure.arms.staged import Staged
from flatout.measure.loading.loaders import LoaderWatch

Keep = Callable[..., Iterator[Any]]


@pytest.fixture
def batches(keep: Keep) -> Iterator[Any]:
    """Batches of (inputs, lengths), of which the step copies the inputs."""
    return keep(DataLoader(TensorDataset(torch.arange(40.0), torch.arange(40)), batch_size=4))


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Page-locked memory without a GPU: addresses that were asked to be so."""
    addresses: set[int] = set()

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        addresses.add(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in addresses)
    return addresses


def test_copied_tensors_lie_on_the_device_from_the_second_step(
    watch: LoaderWatch, batches: Iterator[Any]
) -> None:
    arm = Staged(watch, where="device", suspicion=0.3, device="meta")  # a device without memory
    arm.begin()
    inputs, lengths = next(batches)
    assert inputs.device.type == lengths.device.type == "cpu"
    inputs.to("meta")
    arm.step_end()
    inputs, lengths = next(batches)
    assert inputs.device.type == "meta" and lengths.tolist() == [4, 5, 6, 7]
    arm.end()
    assert next(batches)[0].device.type == "cpu" and arm.refusal is None


def test_copied_tensors_are_pinned_and_copied_without_waiting(
    watch: LoaderWatch, batches: Iterator[Any], pinned: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    copy = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda tensor, *args, **kwargs: asked.append(kwargs) or copy(tensor, *args, **kwargs),
    )
    arm = Staged(watch, where="pinned", suspicion=0.3, device="meta")
    arm.begin()
    for _ in range(2):
        inputs, lengths = next(batches)
        inputs.to("meta")
        arm.step_end()
    assert asked == [{}, {"non_blocking": True}]
    assert inputs.is_pinned() and not lengths.is_pinned()
    arm.end()
    next(batches)[0].to("meta")
    assert asked[-1] == {}


def test_a_step_that_copies_none_of_its_tensors_is_refused(
    watch: LoaderWatch, batches: Iterator[Any]
) -> None:
    arm = Staged(watch, where="device", suspicion=0.3, device="meta")
    arm.begin()
    (next(batches)[0] * 2).to("meta")
    arm.step_end()
    assert arm.refusal is not None and "copies no tensor" in arm.refusal
    assert next(batches)[0].device.type == "cpu"
    arm.end()


def test_without_kept_batches_it_is_refused(watch: LoaderWatch) -> None:
    arm = Staged(watch, where="pinned", suspicion=0.3)
    before = torch.Tensor.to
    arm.begin()
    assert arm.refusal == "no batch was kept"
    arm.end()
    assert torch.Tensor.to is before
