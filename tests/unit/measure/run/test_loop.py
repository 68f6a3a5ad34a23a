from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.ground.errors import NothingMeasured
from flatout.measure.evidence import Evidence, Place
from flatout.measure.run.loop import _made_at, observe_loop
from flatout.measure.user_code import UserCode


class Training:
    """A step function with a state of its own."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.num, self.fails_at = 0, fails_at

    def __call__(self, batch: Any) -> None:
        self.num += 1
        if self.num == self.fails_at:
            raise ZeroDivisionError(f"step {self.num}")
        (x,) = batch
        self.model(x).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def loader(num_batches: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(num_batches * 4, 3)), batch_size=4)


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def evidence(told: list[str]) -> Evidence:
    return observe_loop(Training(), loader(), seconds=60.0, on_progress=told.append)


def test_the_loader_is_repeated_until_the_measurement_is_complete(evidence: Evidence) -> None:
    assert (evidence.job.ended, evidence.job.anchor) == ("measured", "flatout.step")
    assert evidence.job.command == ("Training",)
    assert evidence.counterfactual("cached") is not None
    assert len(evidence.steps) > 8
    assert len(evidence.loaders[0].epochs) > 1


def test_progress_is_told_block_by_block(evidence: Evidence, told: list[str]) -> None:
    blocks = {step.block for step in evidence.steps if step.arm != "warmup"}
    assert len(told) == len(blocks)
    assert told[0].startswith("real: 4 steps, ")


def test_a_list_of_batches_will_do() -> None:
    batches = [(torch.randn(4, 3),) for _ in range(5)]
    found = observe_loop(Training(), batches, seconds=60.0)
    assert found.job.ended == "measured"
    assert found.counterfactual("cached") is not None
    (watched,) = found.loaders
    assert (watched.dataset, watched.num_workers) == ("list", None)


def test_one_batch_per_epoch_will_do() -> None:
    training = Training(fails_at=9)
    with pytest.raises(ZeroDivisionError):
        observe_loop(training, [(torch.randn(4, 3),)], seconds=60.0)
    assert training.num == 9


def test_a_generator_that_is_used_up_gives_what_it_gave() -> None:
    def generate() -> Iterator[Any]:
        for _ in range(16):
            yield (torch.randn(4, 3),)

    found = observe_loop(Training(), generate(), seconds=60.0)
    assert found.job.ended == "finished"
    assert len(found.steps) == 15
    assert any("planned blocks" in message for message in found.missing)


@pytest.mark.parametrize("batches", [[], [(torch.zeros(4, 3),)]], ids=["none", "one of a generator"])
def test_too_few_batches_are_said(batches: list[Any]) -> None:
    with pytest.raises(NothingMeasured, match="fewer than two batches"):
        observe_loop(Training(), iter(batches), seconds=60.0)


def test_an_exception_of_the_step_is_the_callers_own() -> None:
    call = nn.Module.__dict__["__call__"]
    training = Training(fails_at=3)
    with pytest.raises(ZeroDivisionError, match="step 3"):
        observe_loop(training, loader(), seconds=60.0)
    assert nn.Module.__dict__["__call__"] is call
    assert training.num == 3


def test_a_loader_made_before_the_call_is_placed_where_it_was_made() -> None:
    made = loader(2)
    line = sys._getframe().f_lineno - 1
    user_code = UserCode(str(Path(__file__).parent))
    place = _made_at(made, sys._getframe(), user_code)
    assert place == Place(file=Path(__file__).name, line=line, function=place.function if place else None)
    assert _made_at(object(), sys._getframe(), user_code) == user_code.place(sys._getframe())[0]


def test_every_kind_of_loader_has_a_place() -> None:
    kinds: tuple[Any, ...] = (loader(2), [(torch.randn(4, 3),)] * 2)
    for each in kinds:
        (noted,) = observe_loop(Training(), each, seconds=0.01).loaders
        assert noted.place is not None and noted.place.file.endswith("test_loop.py")


def test_another_thread_that_trains_is_not_taken_for_the_callers() -> None:
    stop, other = threading.Event(), Training()

    def train_beside() -> None:
        while not stop.is_set():
            other((torch.randn(4, 3),))

    thread = threading.Thread(target=train_beside)
    thread.start()
    try:
        evidence = observe_loop(Training(), loader(), seconds=0.01)
    finally:
        stop.set()
        thread.join()
    assert (evidence.job.ended, evidence.job.anchor) == ("measured", "flatout.step")
