from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo

from flatout.measure.arms.batches import kept_batches
from flatout.measure.arms.batches.batch_statements import NotMade


def context(trained_on: Any) -> Any:
    return SimpleNamespace(
        loaders=SimpleNamespace(trained_on=lambda: trained_on, cannot_halve=None, num_served=1),
        phases_s={"wait": 0.3},
        step_s=0.5,
    )


def test_batches_are_served_again_whole_and_halved() -> None:
    cached, half, one = kept_batches.propose(context(object()))
    assert (cached.serves, cached.baseline, cached.refusal) == ("cached", "real", None)
    assert (half.serves, half.baseline, half.refusal) == ("half", "cached", None)
    assert (one.serves, one.baseline, one.only_baseline) == ("one", "real", True)
    assert cached.suspicion == pytest.approx(0.6) and half.suspicion < 0.5  # by what the step waits


@pytest.mark.parametrize("number", [0, 1])
def test_steps_that_take_no_batch_do_not_count(number: int) -> None:
    """A loader whose only batch is the whole training set."""
    made = context(object())
    made.loaders.num_served = 0
    arm = tuple(kept_batches.propose(made))[number]
    arm.begin()
    arm.step_end()
    assert arm.fell_back
    made.loaders.num_served = 1
    arm.step_end()
    arm.end()
    assert not arm.fell_back and arm.refusal is None
    made.loaders.num_served = 0
    arm.end()
    assert arm.refusal == "its steps take no batch from the loader"


def test_without_a_loader_the_statements_that_make_the_batch_are_looked_for() -> None:
    def find(_context: Any) -> Any:
        raise NotMade("the model is called in a separate loop")

    made = context(None)
    made.batch_statements = SimpleNamespace(find=find)
    cached, half = kept_batches.propose(made)
    assert (cached.kind, half.kind) == ("cached", "half")
    assert cached.refusal == "no DataLoader is trained on, and the model is called in a separate loop"


def test_batches_that_cannot_be_halved_give_the_arm_up() -> None:
    made = context(object())
    _, half, _one = kept_batches.propose(made)
    made.loaders.cannot_halve = "batches of 3 are too small for it"
    half.step_end()
    assert half.refusal == "batches of 3 are too small for it"


def test_half_batches_leave_the_code_compiled_for_whole_ones_alone() -> None:
    ran: list[str] = []

    def backend(graph: Any, examples: Any) -> Any:
        name = "any size" if any(isinstance(each, torch.SymInt) for each in examples) else "one size"
        return lambda *args: (ran.append(name), graph.forward(*args))[1]

    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2, backend=backend)
    _, half, *_ = kept_batches.propose(context(object()))
    double(torch.ones(8))
    half.begin()
    double(torch.ones(4))
    half.end()
    double(torch.ones(8))
    assert ran == ["one size"] * 3
    double(torch.ones(6))
    assert ran[-1] == "any size"  # as the job's own other sizes are compiled
    torch._dynamo.reset()
