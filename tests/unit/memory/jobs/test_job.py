"""Jobs and recipes refuse what cannot be stepped, all at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from flatout.ground.errors import BadInput
from flatout.memory.jobs.job import PRECISIONS, Job, Recipe, adamw


def job(**sizes: int) -> Job:
    return Job(
        name="line",
        make_model=lambda: nn.Linear(2, 1),
        make_batch=lambda batch_size: torch.zeros(batch_size, 2),
        loss=lambda model, batch: model(batch).sum(),
        sizes=sizes,
    )


def test_a_job_needs_a_batch_size() -> None:
    assert job(batch_size=2, length=3).sizes == {"batch_size": 2, "length": 3}
    with pytest.raises(BadInput, match=r"line lack batch_size: \{'length': 3\}"):
        job(length=3)


def test_a_declared_share_is_a_share() -> None:
    assert dataclasses.replace(job(batch_size=2), true_share=0.25).true_share == 0.25
    for wrong in (0.0, 1.5):
        with pytest.raises(BadInput, match=rf"true_share={wrong} of line must be above 0 and at most 1"):
            dataclasses.replace(job(batch_size=2), true_share=wrong)


def test_the_optimizer_is_adamw_over_the_given_parameters() -> None:
    parameters = list(nn.Linear(2, 1).parameters())
    optimizer = adamw(parameters)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["params"] == parameters


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_is_taken(precision: str) -> None:
    assert Recipe(precision=precision).precision == precision  # type: ignore[arg-type]


def test_everything_wrong_with_a_recipe_is_said_at_once() -> None:
    with pytest.raises(BadInput) as caught:
        Recipe(precision="fp8", accumulation=0, clip_norm=0.0, new_tokens=-1)  # type: ignore[arg-type]
    for part in ("precision='fp8'", "accumulation=0", "clip_norm=0.0", "new_tokens=-1"):
        assert part in caught.value.message


@pytest.mark.parametrize(
    "wrong",
    [{"accumulation": 1.5}, {"accumulation": "2"}, {"clip_norm": "1"}, {"clip_norm": float("nan")}],
    ids=str,
)
def test_a_recipe_of_other_kinds_of_values_is_refused(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(BadInput, match=f"{name}={value!r} must be"):
        Recipe(**wrong)


def test_recipes_are_keys() -> None:
    assert {Recipe(): 1}[Recipe(precision="fp32")] == 1
    assert Recipe() != Recipe(checkpointing=True)


def test_a_loss_of_outputs_and_targets_is_told_from_one_of_model_and_batch() -> None:
    with pytest.raises(BadInput, match=r"loss of line is MSELoss, which takes .* MSELoss\(\)\(model\(batch"):
        dataclasses.replace(job(batch_size=1), loss=nn.MSELoss())
