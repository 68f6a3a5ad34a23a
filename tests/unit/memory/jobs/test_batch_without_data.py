"""Large tensors of a batch have no data; small ones and integers are as the batch maker made them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from flatout.memory.jobs.batch_without_data import LARGEST, make_batch
from flatout.memory.jobs.from_objects import job_of
from flatout.memory.jobs.job import Job


def batch_of(maker: Any, *, batch_size: int) -> Any:
    job = Job(
        name="a job", make_model=lambda: nn.Linear(1, 1), make_batch=maker, loss=lambda model, batch: batch
    )
    return make_batch(job, {"batch_size": batch_size})


def normalised(*, batch_size: int) -> dict[str, Any]:
    x = torch.randn(batch_size, 2_000_000)
    return {
        "x": x / x.norm(dim=1, keepdim=True),
        "rows": x[torch.arange(batch_size) % 3],
        "label": torch.randint(0, 10, (batch_size,)),
    }


def test_a_batch_of_half_a_terabyte_is_made_without_data() -> None:
    batch = batch_of(normalised, batch_size=65_536)
    assert tuple(batch["x"].shape) == tuple(batch["rows"].shape) == (65_536, 2_000_000)
    assert isinstance(batch["x"], FakeTensor)
    assert not isinstance(batch["label"], FakeTensor)
    assert 0 <= int(batch["label"].min()) <= int(batch["label"].max()) < 10


def test_an_example_is_repeated_without_data() -> None:
    job = job_of(nn.Linear(1000, 1), torch.ones(4, 1000))
    batch = make_batch(job, {"batch_size": LARGEST})
    assert isinstance(batch, FakeTensor)
    assert tuple(batch.shape) == (LARGEST, 1000)


def test_a_small_batch_is_the_makers_own() -> None:
    def maker(*, batch_size: int) -> Any:
        drawn = torch.randint(0, 50_000, (batch_size, 512))
        return drawn, (drawn > 3).nonzero()

    torch.manual_seed(3)
    expected = maker(batch_size=8)
    torch.manual_seed(3)
    for found, wanted in zip(batch_of(maker, batch_size=8), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_maker_that_reads_large_values_gets_them() -> None:
    torch.manual_seed(0)
    wanted = float(torch.rand(LARGEST + 1).sum())
    torch.manual_seed(0)
    drawn = batch_of(lambda *, batch_size: torch.rand(batch_size).sum().item(), batch_size=LARGEST + 1)
    assert drawn == pytest.approx(wanted)


def test_an_error_of_the_maker_is_its_own() -> None:
    def maker(*, batch_size: int) -> Any:
        raise KeyError("no such file")

    with pytest.raises(KeyError, match="no such file"):
        batch_of(maker, batch_size=8)
