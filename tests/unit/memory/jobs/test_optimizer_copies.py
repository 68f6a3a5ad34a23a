"""A copied optimizer steps the copied parameters, and nothing of the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flatout.memory.jobs.from_objects import copy_model
from flatout.memory.jobs.optimizer_copies import OptimizerSequence, make_copies_of


class Ascending(torch.optim.Optimizer):
    """Climbs before it steps the optimizer within, with which it shares its groups, as SAM does."""

    def __init__(self, params: Any, make: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(params, {"rho": 0.05})
        self.within = make(self.param_groups, lr=0.1)
        self.param_groups = self.within.param_groups
        self.averages = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.clone()
        for average, p in zip(self.averages, self.param_groups[0]["params"], strict=True):
            average.add_(p)
        self.within.step()


def copied(model: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    twin = copy_model(model)
    made = make_copies_of(optimizers, model)(list(twin.parameters()))
    twin(torch.ones(2, 3)).sum().backward()
    made.step()
    return twin, made


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scheduler_does_not_take_the_step_to_the_original() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    twin, made = copied(model, optimizer)
    assert set(made.state) == set(twin.parameters())
    assert not torch.equal(twin.weight, model.weight)  # type: ignore[arg-type]
    assert not optimizer.state
    assert scheduler.optimizer is optimizer


def test_an_optimizer_within_another_is_copied_with_it() -> None:
    model = nn.Linear(3, 2)
    original = Ascending(model.parameters(), torch.optim.Adam)
    twin, made = copied(model, original)
    assert isinstance(made, Ascending)
    assert made.within is not original.within
    assert made.param_groups is made.within.param_groups
    assert set(made.state) == set(made.within.state) == set(twin.parameters())
    assert not original.state
    assert not original.within.state
    assert all(float(average.abs().sum()) == 0.0 for average in original.averages)
    assert any(float(average.abs().sum()) > 0.0 for average in made.averages)


def test_several_optimizers_step_one_after_another() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    twin, made = copied(
        model,
        torch.optim.Adam(model[0].parameters()),
        torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9),
    )
    assert isinstance(made, OptimizerSequence)
    assert [len(each.state) for each in made.optimizers] == [2, 2]
    assert len(made.param_groups[0]["params"]) == len(list(twin.parameters()))
