"""Sums whose answers are right, and whose mirrored twins stay on one side of the split."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flatout.engines.evolution.tasks.arithmetic import Arithmetic
from flatout.engines.evolution.tasks.countdown import read_expression
from flatout.engines.evolution.tasks.task import EvolutionTask
from flatout.ground.errors import BadInput
from flatout.testing.evolution_tasks import EvolutionTaskContract


class TestSums(EvolutionTaskContract):
    def make_task(self, folder: Path) -> EvolutionTask:
        return Arithmetic()


class TestProducts(EvolutionTaskContract):
    def make_task(self, folder: Path) -> EvolutionTask:
        return Arithmetic(digits=3, operations="*")


def test_answers_are_right_and_all_operations_are_asked() -> None:
    task = Arithmetic(operations="+-*")
    signs = set()
    for prompt in task.prompts("train", epoch=0, count=100, seed=0):
        found = re.search(r"What is ((\d+) ([-+*]) (\d+))\?", prompt.text or "")
        assert found is not None
        signs.add(found[3])
        expression = read_expression(found[1])
        assert expression is not None and expression.value == int(prompt.answer["answer"])
        assert len(prompt.answer["answer"]) <= task.max_new_tokens
        assert task.reward(f" {prompt.answer['answer']}\nQuestion: What is 1 + 1?", prompt.answer) == 1.0
        assert task.reward(f" {expression.value + 1}", prompt.answer) == 0.0
    assert signs == set("+-*")


def test_swapped_operands_are_one_problem() -> None:
    keys = {}
    for split in ("train", "heldout"):
        for prompt in Arithmetic(digits=1, operations="+").prompts(split, epoch=0, count=40, seed=0):  # type: ignore[arg-type]
            numbers = frozenset(re.findall(r"\d+", prompt.text or ""))
            assert keys.setdefault(numbers, prompt.key) == prompt.key


@pytest.mark.parametrize(
    ("options", "message"),
    [({"digits": 0}, "digits=0"), ({"operations": "+^"}, r"operations='\+\^'"), ({"operations": ""}, "oper")],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Arithmetic(**options)  # type: ignore[arg-type]
