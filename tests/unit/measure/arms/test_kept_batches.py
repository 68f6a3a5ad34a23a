from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flatout.measure.arms import kept_batches
from flatout.measure.arms.batch_statements import NotMade


def context(trained_on: Any) -> Any:
    return SimpleNamespace(loaders=SimpleNamespace(trained_on=lambda: trained_on, cannot_halve=None))


def test_batches_are_served_again_whole_and_halved() -> None:
    cached, half, one = kept_batches.propose(context(object()))
    assert (cached.serves, cached.baseline, cached.refusal) == ("cached", "real", None)
    assert (half.serves, half.baseline, half.refusal) == ("half", "cached", None)
    assert (one.serves, one.baseline, one.only_baseline) == ("one", "real", True)


def test_without_a_loader_the_statements_that_make_the_batch_are_looked_for() -> None:
    def find(_context: Any) -> Any:
        raise NotMade("the model is called in a loop of its own")

    made = context(None)
    made.batch_statements = SimpleNamespace(find=find)
    cached, half = kept_batches.propose(made)
    assert (cached.kind, half.kind) == ("cached", "half")
    assert cached.refusal == "no DataLoader is trained on, and the model is called in a loop of its own"


def test_batches_that_cannot_be_halved_give_the_arm_up() -> None:
    made = context(object())
    _, half, _one = kept_batches.propose(made)
    made.loaders.cannot_halve = "batches of 3 are too small for it"
    half.step_end()
    assert half.refusal == "batches of 3 are too small for it"
