"""What every task promises, checked the same way for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flatout.engines.evolution.tasks import Task


def _check(task: Task, *, count: int = 40) -> None:
    def keys(split: str, *, epoch: int = 0, seed: int = 0) -> list[str]:
        return [p.key for p in task.prompts(split, epoch=epoch, count=count, seed=seed)]  # type: ignore[arg-type]

    for split in ("train", "heldout"):
        assert task.prompts(split, epoch=3, count=count, seed=1) == task.prompts(
            split, epoch=3, count=count, seed=1
        )
    assert keys("train", epoch=0) != keys("train", epoch=1)
    assert keys("train", seed=0) != keys("train", seed=1)
    assert keys("heldout", epoch=0) == keys("heldout", epoch=7)
    assert keys("heldout") and len(set(keys("heldout"))) == len(keys("heldout"))
    trained = {
        key for seed in range(3) for epoch in range(20) for key in keys("train", epoch=epoch, seed=seed)
    }
    held_out = {key for seed in range(3) for key in keys("heldout", seed=seed)}
    assert len(trained) > 20 and held_out
    assert not trained & held_out
    assert len(keys("train")) == count
    assert task.max_new_tokens > 0


@pytest.fixture
def check_promises() -> Callable[[Task], None]:
    """Deterministic, another list each epoch, the same held-out ones, and never the two mixed."""
    return _check
