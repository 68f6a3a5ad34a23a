"""The contract finds a task that breaks it; tests/unit/engines/evolution/tasks holds the five tasks to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flatout.engines.evolution.rewards.kinds import Reward
from flatout.engines.evolution.tasks.arithmetic import Arithmetic
from flatout.engines.evolution.tasks.task import Prompt, Split
from flatout.testing.evolution_tasks import EvolutionTaskContract


@dataclass(frozen=True, kw_only=True)
class TrainsOnAll(Arithmetic):
    """Training prompts are held-out ones too."""

    def prompts(self, split: Split, *, epoch: int, count: int, seed: int) -> list[Prompt]:
        return super().prompts("heldout", epoch=epoch, count=count, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Forgets(Arithmetic):
    """Held-out prompts go by the epoch."""

    def prompts(self, split: Split, *, epoch: int, count: int, seed: int) -> list[Prompt]:
        return super().prompts(split, epoch=epoch, count=count, seed=seed + epoch)


@dataclass(frozen=True, kw_only=True)
class Endless(Arithmetic):
    """Its stop text is empty."""

    stop: ClassVar[tuple[str, ...]] = ("",)


@dataclass(frozen=True, kw_only=True)
class Infinite(Arithmetic):
    """A reward that is not a number, and cannot travel."""

    reward: ClassVar[Reward] = staticmethod(lambda completion, answer: float("nan"))  # type: ignore[assignment]


def contract(broken: Any) -> EvolutionTaskContract:
    return type("Contract", (EvolutionTaskContract,), {"make_task": lambda self, folder: broken})()


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (TrainsOnAll(), "test_nothing_held_out_is_trained_on"),
        (TrainsOnAll(), "test_training_prompts_are_others_in_another_epoch_and_with_another_seed"),
        (Forgets(), "test_held_out_prompts_stay_the_same_and_never_repeat"),
        (Endless(), "test_a_completion_has_an_end"),
        (Infinite(), "test_the_reward_is_a_finite_number_for_any_text"),
        (Infinite(), "test_a_reward_that_is_not_cheap_travels_to_another_process"),
    ],
)
def test_a_task_that_breaks_its_contract_fails(broken: Any, test: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"(?s).*") as caught:
        getattr(contract(broken), test)(tmp_path)
    assert caught.type.__name__ in ("AssertionError", "PicklingError", "AttributeError")
    getattr(contract(Arithmetic()), test)(tmp_path)


def test_a_contract_without_a_task_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError):
        EvolutionTaskContract().make_task(tmp_path)
