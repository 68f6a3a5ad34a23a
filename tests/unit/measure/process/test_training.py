from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from flatout.measure.clock import Clock
from flatout.measure.patches import Patches
from flatout.measure.process.training import TrainingWatch
from flatout.measure.user_code import UserCode
from tests.support.measure import line_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: Any) -> Any:  # at: its forward
        return self.used(x) + self.frozen(x)


@pytest.fixture
def watch() -> Iterator[TrainingWatch]:
    patches, clock = Patches(), Clock()
    clock.owner = threading.get_ident()
    watch = TrainingWatch(clock, UserCode(str(Path(__file__).parent)))
    watch.install(patches)
    yield watch
    patches.undo()


def train(watch: TrainingWatch, model: nn.Module, optimizer: Any, *, steps: int, inputs: Any = None) -> None:
    inputs = torch.ones(4, 2) if inputs is None else inputs
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        watch.note_loss(loss)
        optimizer.step()
        watch.note_optimizer(optimizer)
        watch.step_end("warmup")


def test_a_layer_that_forward_forgets_is_untrained_and_a_frozen_one_is_not(watch: TrainingWatch) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(watch, model, optimizer, steps=3)
    watch.block_begins(of_arm=False)
    (untrained,) = watch.evidence().untrained
    assert (untrained.module, untrained.num, untrained.num_steps) == ("Model", 2, 3)
    assert untrained.names == ("unused.bias", "unused.weight")
    assert untrained.place is not None and untrained.place.line == line_of(Path(__file__), "its forward")


def test_parameters_that_had_a_gradient_once_are_trained(watch: TrainingWatch) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(watch, model, optimizer, steps=1)
    model.unused(torch.ones(1, 2)).sum().backward()
    watch.note_optimizer(optimizer)
    optimizer.zero_grad()
    watch.note_optimizer(optimizer)
    watch.block_begins(of_arm=False)
    assert watch.evidence().untrained == ()


def test_gradients_that_an_arm_makes_do_not_count(watch: TrainingWatch) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(watch, model, optimizer, steps=2)
    watch.block_begins(of_arm=True)
    model.unused(torch.ones(1, 2)).sum().backward()
    watch.note_optimizer(optimizer)
    watch.block_begins(of_arm=False)
    (untrained,) = watch.evidence().untrained
    assert untrained.num_steps == 2


def test_an_optimizer_that_needs_no_gradients_has_no_untrained_parameters(watch: TrainingWatch) -> None:
    watch.note_optimizer(torch.optim.SGD(Model().parameters(), lr=0.1))
    watch.block_begins(of_arm=False)
    assert watch.evidence().untrained == ()


def test_losses_that_are_not_finite_are_counted_from_the_end(watch: TrainingWatch) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(watch, model, optimizer, steps=2)
    assert watch.evidence().losses.num_not_finite == 0
    train(watch, model, optimizer, steps=3, inputs=torch.full((4, 2), float("inf")))
    losses = watch.evidence().losses
    assert (losses.num, losses.num_not_finite) == (5, 3)
    assert losses.place is not None and losses.place.function == "train"


def test_losses_are_looked_at_in_warm_up_alone(watch: TrainingWatch) -> None:
    watch.step_end("real")
    watch.note_loss(torch.tensor(1.0))
    watch.step_end("real")
    watch.note_loss([torch.tensor(1.0)])
    assert watch.evidence().losses.num == 0


def test_schedules_with_an_end_are_known(watch: TrainingWatch) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = CosineAnnealingLR(optimizer, T_max=7)  # at: the cosine
    other = StepLR(optimizer, 3)
    train(watch, model, optimizer, steps=2)
    schedule.step()
    watch.block_begins(of_arm=False)
    (found,) = watch.evidence().schedules
    assert (found.argument, found.horizon, found.num_steps, found.num_optimizer_steps) == ("T_max", 7, 1, 2)
    assert found.place is not None and found.place.line == line_of(Path(__file__), "the cosine")
    assert other is not None
