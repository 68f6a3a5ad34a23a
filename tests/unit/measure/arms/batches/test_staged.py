from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flatout.measure.arms.arm import Arm
from flatout.measure.arms.batches.staged import Staged, propose
from flatout.measure.evidence import Place, Site
from flatout.measure.loading.loaders import LoaderWatch

Keep = Callable[..., Iterator[Any]]
Block = Callable[[Arm], None]


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
    watch: LoaderWatch, begin: Block, end: Block, batches: Iterator[Any]
) -> None:
    arm = Staged(watch, where="device", suspicion=0.3, device="meta")  # a device without memory
    begin(arm)
    inputs, lengths = next(batches)
    assert inputs.device.type == lengths.device.type == "cpu"
    inputs.to("meta")
    arm.step_end()
    inputs, lengths = next(batches)
    assert inputs.device.type == "meta" and lengths.tolist() == [4, 5, 6, 7]
    end(arm)
    assert next(batches)[0].device.type == "cpu" and arm.refusal is None


def test_copied_tensors_are_pinned_and_copied_without_waiting(
    watch: LoaderWatch,
    begin: Block,
    end: Block,
    batches: Iterator[Any],
    pinned: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    copy = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda tensor, *args, **kwargs: asked.append(kwargs) or copy(tensor, *args, **kwargs),
    )
    arm = Staged(watch, where="pinned", suspicion=0.3, device="meta")
    begin(arm)
    for _ in range(2):
        inputs, lengths = next(batches)
        inputs.to("meta")
        arm.step_end()
    assert asked == [{}, {"non_blocking": True}]
    assert inputs.is_pinned() and not lengths.is_pinned()
    end(arm)
    next(batches)[0].to("meta")
    assert asked[-1] == {}


def test_a_step_that_copies_none_of_its_tensors_is_refused(
    watch: LoaderWatch, begin: Block, end: Block, batches: Iterator[Any]
) -> None:
    arm = Staged(watch, where="device", suspicion=0.3, device="meta")
    begin(arm)
    (next(batches)[0] * 2).to("meta")
    arm.step_end()
    assert arm.refusal is not None and "copies no tensor" in arm.refusal
    assert next(batches)[0].device.type == "cpu"
    end(arm)


def test_without_kept_batches_it_is_refused(watch: LoaderWatch, begin: Block, end: Block) -> None:
    arm = Staged(watch, where="pinned", suspicion=0.3)
    before = torch.Tensor.to
    begin(arm)
    assert arm.refusal == "no batch was kept"
    end(arm)
    assert torch.Tensor.to is before


def copy(*, pinned: bool) -> Site:
    place = Place(file="train.py", line=9)
    return Site(
        kind="copy",
        op="to",
        place=place,
        via=None,
        calls_per_step=2,
        device="cuda",
        bytes_per_step=1e6,
        pinned=pinned,
    )


@pytest.mark.usefixtures("batches")
def test_copies_that_take_time_are_proposed(context: Any) -> None:
    found = {"device": "cuda", "phases_s": {"transfer": 0.3}}
    arms = list(propose(context(sites=(copy(pinned=False),), **found)))
    assert [(arm.label, arm.suspicion, arm.place.line) for arm in arms if arm.place is not None] == [
        ("staged", 0.3, 9),
        ("staged-on-device", 0.3, 9),
    ]
    pinned = list(propose(context(sites=(copy(pinned=True),), **found)))
    assert [arm.label for arm in pinned] == ["staged-on-device"]
    quick = {"device": "cuda", "phases_s": {"transfer": 0.01}}
    assert not list(propose(context(sites=(copy(pinned=False),), **quick)))
    assert not list(propose(context(phases_s={"transfer": 0.3})))
