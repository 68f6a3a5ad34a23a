"""Prompts, the line between training and held-out prompts, and the order on each side of it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.evolution.tasks.arithmetic import Arithmetic
from flatout.engines.evolution.tasks.task import (
    HELD_OUT_ONE_IN,
    GeneratedTask,
    Prompt,
    Split,
    ask_prompts,
    ordered_prompts,
    split_of,
    text_of_ids,
)
from flatout.ground.errors import BadInput


def prompt(number: int) -> Prompt:
    return Prompt(text=str(number), answer={}, key=f"number {number}")


class Numbers(GeneratedTask):
    name = "small"

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def draw(self, stream: random.Random) -> Prompt:
        return prompt(stream.choice(self.numbers))


def test_a_share_is_held_out() -> None:
    counts = Counter(split_of(f"key {number}") for number in range(8000))
    assert counts["heldout"] == pytest.approx(8000 / HELD_OUT_ONE_IN, rel=0.1)


def test_the_split_is_the_same_in_every_process() -> None:
    code = (
        "from flatout.engines.evolution.tasks.task import split_of;"
        "print(*[split_of(f'key {n}') for n in range(50)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [split_of(f"key {number}") for number in range(50)]


@given(count=st.integers(0, 60), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_training_prompts_repeat_only_after_all_were_given(count: int, seed: int, epoch: int) -> None:
    size = 20
    num_train = sum(split_of(prompt(number).key) == "train" for number in range(size))
    prompts = Numbers(*range(size)).prompts("train", epoch=epoch, count=count, seed=seed)
    assert len(prompts) == count
    repeats = Counter(p.key for p in prompts).values()
    if prompts:
        assert max(repeats) == -(-count // num_train)


def test_held_out_prompts_end_where_there_are_no_more() -> None:
    size = 50
    keys = {prompt(number).key for number in range(size) if split_of(prompt(number).key) == "heldout"}
    prompts = Numbers(*range(size)).prompts("heldout", epoch=0, count=99, seed=0)
    assert {p.key for p in prompts} == keys and len(prompts) == len(keys) > 1


def test_a_split_without_prompts_is_refused() -> None:
    trained = next(number for number in range(99) if split_of(prompt(number).key) == "train")
    with pytest.raises(BadInput, match="small has no prompt for the split 'heldout'"):
        Numbers(trained).prompts("heldout", epoch=0, count=1, seed=0)


@given(size=st.integers(1, 30), count=st.integers(1, 40), seed=st.integers(0, 9), epochs=st.integers(1, 6))
def test_epochs_go_through_all_prompts_lap_by_lap(size: int, count: int, seed: int, epochs: int) -> None:
    prompts = [prompt(number) for number in range(size)]
    taken = [
        p.key
        for epoch in range(epochs)
        for p in ordered_prompts(prompts, split="train", epoch=epoch, count=count, seed=seed)
    ]
    assert len(taken) == epochs * count
    for start in range(0, len(taken) - size + 1, size):
        assert len(set(taken[start : start + size])) == size


def test_held_out_order_depends_on_the_seed_alone() -> None:
    prompts = [prompt(number) for number in range(30)]

    def keys(*, epoch: int, seed: int, count: int = 10) -> list[str]:
        found = ordered_prompts(prompts, split="heldout", epoch=epoch, count=count, seed=seed)
        return [p.key for p in found]

    assert keys(epoch=0, seed=0) == keys(epoch=9, seed=0) != keys(epoch=0, seed=1)
    assert len(keys(epoch=0, seed=0, count=99)) == 30
    assert ordered_prompts([], split="train", epoch=0, count=3, seed=0) == []


def test_a_prompt_is_one_of_the_two() -> None:
    assert Prompt(text="a", answer={}, key="a").token_ids is None
    assert Prompt(token_ids=(1,), answer={}, key="a").text is None
    for both in ({}, {"text": "a", "token_ids": (1,)}):
        with pytest.raises(ValueError, match="exactly one of text and token_ids"):
            Prompt(answer={}, key="a", **both)  # type: ignore[arg-type]


def test_token_numbers_as_text() -> None:
    assert text_of_ids([4, 10, 7]) == "4 10 7"
    assert text_of_ids(()) == ""


class Faulty(Numbers):
    max_new_tokens = 1
    stop = ()
    reward = len  # type: ignore[assignment]
    given: object = None

    def draw(self, stream: random.Random) -> Prompt:
        if self.given == "both":
            return Prompt(text="one", token_ids=(1,), answer={}, key="both")
        raise KeyError("no such word")

    def prompts(self, split: Split, **options: Any) -> Any:
        return self.given if isinstance(self.given, list) else super().prompts(split, **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"the task \S+test_task:Faulty raised KeyError: 'no such word' \(at \S+test_task\.py:\d+\)"),
        (
            "both",
            r"Faulty raised ValueError: the prompt both needs exactly one .* \(at \S+test_task\.py:\d+\)",
        ),
        (["one"], "Faulty gives a str as a prompt"),
        ([Prompt(text="x", answer="4", key="x")], "Faulty gives a str as the answer of a prompt"),  # type: ignore[arg-type]
        ([], "Faulty has no prompt for the split 'train'"),
    ],
)
def test_a_fault_of_a_users_task_is_named_as_theirs(given: object, message: str) -> None:
    task = Faulty(1)
    task.given = given
    with pytest.raises(BadInput, match=message):
        ask_prompts(task, "train", epoch=0, count=1, seed=0)


def test_a_fault_of_a_task_of_ours_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, stream: random.Random) -> Prompt:
        raise KeyError("ours")

    monkeypatch.setattr(Arithmetic, "draw", broken)
    with pytest.raises(KeyError, match="ours"):
        ask_prompts(Arithmetic(), "train", epoch=0, count=1, seed=0)
