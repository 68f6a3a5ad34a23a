"""The largest batch of objects that exist already, as a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import flatout
from flatout.api import fit
from flatout.ground.errors import BatchDoesNotFit

GIB = 2**30


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    answer: torch.Tensor = model(batch).square().mean()
    return answer


def test_the_largest_batch_comes_with_its_estimate() -> None:
    found = fit(tower(), torch.zeros(8, 32, 256), loss=loss, device="2GB", precision="bf16")
    assert found.batch_size >= (found.safe_batch_size or 0) > 8
    assert found.estimate.sizes == {"batch_size": found.batch_size}
    assert found.estimate.precision == "bf16"
    assert found.budget.usable_bytes == int(2e9 * 0.85)
    above = flatout.plan(
        tower(),
        torch.zeros(round(found.batch_size * 1.2), 32, 256),
        loss=loss,
        device="2GB",
        precision="bf16",
    )
    assert above.process_bytes is not None and above.process_bytes > found.budget.usable_bytes
    assert str(found).startswith(f"batch {found.batch_size} fits: 2GB has ")
    document = json.loads(json.dumps(found.to_json(), default=str))
    assert (document["format"], document["batch_size"]) == ("flatout-job-fit", found.batch_size)
    assert document["estimate"]["format"] == "flatout-memory-estimate"


def test_a_job_that_does_not_fit_says_what_would_help() -> None:
    rows = torch.zeros(1, 1 << 20, 64)
    with pytest.raises(BatchDoesNotFit, match=r"batch_size=1 needs .*what would help: .*a GPU from"):
        fit(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), rows, loss=loss, device="2GB")
