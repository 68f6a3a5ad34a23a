"""Digits to copy, as text and as token numbers."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from flatout.engines.evolution.tasks.digit_copy import CopiedShare, DigitCopy
from flatout.engines.evolution.tasks.task import EvolutionTask, text_of_ids
from flatout.ground.errors import BadInput
from flatout.testing.evolution_tasks import EvolutionTaskContract


class TestDigits(EvolutionTaskContract):
    def make_task(self, folder: Path) -> EvolutionTask:
        return DigitCopy()


class TestTokenNumbers(EvolutionTaskContract):
    def make_task(self, folder: Path) -> EvolutionTask:
        return DigitCopy(length=2, token_ids=True)


def test_a_copy_of_the_prompt_is_worth_one() -> None:
    task = DigitCopy(length=5, token_ids=True, first_token_id=20)
    for prompt in task.prompts("train", epoch=0, count=20, seed=0):
        assert prompt.token_ids is not None
        *digits, separator = prompt.token_ids
        assert separator == 30 and all(20 <= digit < 30 for digit in digits)
        assert len(digits) == task.max_new_tokens == 5
        assert task.reward(text_of_ids(digits), prompt.answer) == 1.0
        assert task.reward(text_of_ids([separator] * 5), prompt.answer) == 0.0


def test_text_prompts_show_their_digits() -> None:
    for prompt in DigitCopy().prompts("heldout", epoch=0, count=5, seed=0):
        digits = prompt.answer["digits"]
        assert prompt.text is not None and " ".join(digits) in prompt.text
        assert DigitCopy().reward(f" {digits}\nDigits: 9 9", prompt.answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "share"),
    [("4071", 1.0), (" 4 0 7 1\n5", 1.0), ("4 0 7", 0.75), ("4001", 0.75), ("40714071", 0.5), ("", 0.0)],
)
def test_the_reward_is_the_share_of_right_places(completion: str, share: float) -> None:
    assert CopiedShare()(completion, {"digits": "4071"}) == share


def test_token_numbers_are_whole_numbers() -> None:
    assert CopiedShare()("12 3", {"token_ids": "1 2 3"}) == 0.0
    assert CopiedShare()("1 2 4", {"token_ids": "1 2 3"}) == pytest.approx(2 / 3)


def test_its_reward_travels() -> None:
    assert pickle.loads(pickle.dumps(DigitCopy().reward)) == CopiedShare()  # noqa: S301  as a pipe does it


@pytest.mark.parametrize("options", [{"length": 1}, {"first_token_id": -1}])
def test_bad_options(options: dict[str, int]) -> None:
    with pytest.raises(BadInput, match=next(iter(options))):
        DigitCopy(**options)  # type: ignore[arg-type]
