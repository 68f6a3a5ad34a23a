from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from flatout.data import DeviceDataset, Pad, Padded, RaggedArrays, TokenBudgetBatches
from flatout.data.device_dataset import choose_place
from flatout.ground.errors import BadInput


def arrays(count: int = 20) -> RaggedArrays:
    lengths = np.arange(count) % 5
    starts = np.cumsum(lengths) - lengths
    return RaggedArrays(
        {"x": np.arange(lengths.sum()), "y": np.arange(count)}, spans={"x": (starts, lengths)}
    )


def same(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_every_record_once_and_the_same_wherever_the_arrays_are(form: Any) -> None:
    host, device = (
        DeviceDataset(arrays(), device="cpu", batch_size=6, form=form, place=place, seed=3)
        for place in ("host", "device")
    )
    first = list(host)
    assert sorted(torch.cat([batch["y"] for batch in first]).tolist()) == list(range(20))
    assert len(host) == len(first) == 4
    assert same(first, list(device))
    assert not same(first, list(host))  # the next epoch
    host.set_epoch(0)
    assert same(first, list(host))


def test_batches_of_a_sampler() -> None:
    data = arrays()
    sampler = TokenBudgetBatches(data.lengths(), tokens=12)
    batches = list(DeviceDataset(data, device="cpu", batches=sampler, pads={"x": Pad(value=-1, lengths="n")}))
    assert all(batch["x"].numel() <= 12 for batch in batches)
    assert all(((batch["x"] >= 0).sum(1) == batch["n"]).all() for batch in batches)


def test_batches_of_any_iterable_and_a_transform() -> None:
    chosen = [[0, 1], [3]]
    dataset = DeviceDataset(
        arrays(), device="cpu", batches=chosen, transform=lambda batch: batch["y"].tolist()
    )
    assert list(dataset) == chosen
    with pytest.raises(BadInput, match="list has no state_dict"):
        dataset.state_dict()


def test_padded_fields_may_come_with_their_mask() -> None:
    dataset = DeviceDataset(arrays(), device="cpu", batch_size=4, pads={"x": Pad(mask=True)})
    assert all(isinstance(batch["x"], Padded) for batch in dataset)


def test_resumed_is_uninterrupted() -> None:
    def make() -> DeviceDataset:
        return DeviceDataset(arrays(), device="cpu", batch_size=3, seed=1)

    whole = make()
    expected = list(whole) + list(whole)
    first = make()
    taken = list(itertools.islice(first, 4))
    second = make()
    second.load_state_dict(first.state_dict())
    assert same(taken + list(second) + list(second), expected)


def test_dropping_the_last() -> None:
    sizes = [len(batch["y"]) for batch in DeviceDataset(arrays(), device="cpu", batch_size=6, drop_last=True)]
    assert sizes == [6, 6, 6]


def test_the_place_has_a_reason() -> None:
    cpu = torch.device("cpu")
    decision = choose_place(100, device=cpu, place="auto", memory_share=0.5)
    assert decision.value == "host" and "cpu" in decision.reason
    for place in ("host", "device"):
        chosen = choose_place(100, device=cpu, place=place, memory_share=0.5)
        assert (chosen.value, chosen.reason) == (place, "asked for")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "either batches or batch_size"),
        ({"batch_size": 2, "batches": [[0]]}, "either batches or batch_size"),
        ({"batch_size": 2, "form": "loose"}, "form='loose'"),
        ({"batch_size": 2, "place": "disk"}, "place='disk'"),
    ],
)
def test_settings_that_cannot_work_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        DeviceDataset(arrays(), device="cpu", **given)


def test_a_record_that_is_not_there_is_named() -> None:
    with pytest.raises(BadInput, match="there is no record 99"):
        list(DeviceDataset(arrays(), device="cpu", batches=[[99]]))
