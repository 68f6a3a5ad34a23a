"""Every problem can be solved, and only solutions are worth one."""

from __future__ import annotations

import operator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.evolution.tasks.countdown import LONGEST, Countdown, CountdownReward, read_expression
from flatout.engines.evolution.tasks.task import EvolutionTask
from flatout.ground.errors import BadInput
from flatout.testing.evolution_tasks import EvolutionTaskContract

FACTS = {"numbers": "3 7 25 50", "target": "64"}


class TestCountdown(EvolutionTaskContract):
    def make_task(self, folder: Path) -> EvolutionTask:
        return Countdown()


@given(num_numbers=st.integers(2, 8), seed=st.integers(0, 10**6))
def test_every_problem_has_the_solution_it_was_made_from(num_numbers: int, seed: int) -> None:
    task = Countdown(num_numbers=num_numbers)
    for prompt in task.prompts("train", epoch=0, count=5, seed=seed):
        numbers = list(map(int, prompt.answer["numbers"].split()))
        assert len(numbers) == num_numbers and all(1 <= number <= 25 for number in numbers)
        assert 1 <= int(prompt.answer["target"]) <= 100
        assert prompt.text is not None and prompt.answer["numbers"] in prompt.text
        assert prompt.answer["solution"] not in prompt.text
        assert task.reward(prompt.answer["solution"], prompt.answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "worth"),
    [
        ("50 + 7 * (25 - 3) / 11", 0.0),  # 11 was not given
        ("50 + 25 - 7 - 3", 0.1),
        ("25 + 50 - 7 - 3 = 64", 0.1),  # it says 64, and is 65
        ("50 + 25", 0.0),
        ("50 + 25 - 7 - 3 - 3", 0.0),
        ("64", 0.0),
        ("I think 50 + 25 - 7 - 3", 0.0),
        ("well,\n<answer>50 + 25 - 7 - 3</answer>", 0.1),
        ("", 0.0),
    ],
)
def test_what_is_no_solution(completion: str, worth: float) -> None:
    assert CountdownReward()(completion, FACTS) == worth


@pytest.mark.parametrize(
    "completion",
    [
        "(10 - 2) * 8",
        " (10-2)*8 = 64\nmore",
        "8 × (10 \u2212 2)",
        "8*(2-10)<answer>1</answer> no: <answer> 8 * (10 - 2) </answer>",
    ],
)
def test_ways_to_write_a_solution(completion: str) -> None:
    assert CountdownReward()(completion, {"numbers": "2 8 10", "target": "64"}) == 1.0


def test_reasoning_is_asked_for_and_ends_with_the_answer() -> None:
    task = Countdown(reasoning=True)
    prompt = task.prompts("train", epoch=0, count=1, seed=0)[0]
    assert prompt.text is not None and "step by step" in prompt.text
    said = f"I try\n1 + 1\n<answer>{prompt.answer['solution']}</answer>"
    assert task.reward(said.partition(task.stop[0])[0], prompt.answer) == 1.0
    assert Countdown().stop == ("\n",)


def test_format_credit_is_an_option() -> None:
    assert Countdown(format_credit=0.0).reward("50 + 25 - 7 - 3", FACTS) == 0.0


@pytest.mark.parametrize(
    "options", [{"num_numbers": 1}, {"num_numbers": 9}, {"largest": 1}, {"largest_target": 1}]
)
def test_bad_options(options: dict[str, int]) -> None:
    with pytest.raises(BadInput, match=next(iter(options))):
        Countdown(**options)  # type: ignore[arg-type]


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@st.composite
def expressions(draw: st.DrawFn) -> tuple[str, Fraction]:
    """An expression without divisions by zero, and its value."""
    numbers = draw(st.lists(st.integers(1, 99), min_size=1, max_size=7))
    text, value = str(numbers[0]), Fraction(numbers[0])
    for number in numbers[1:]:
        sign = draw(st.sampled_from(sorted(OPERATIONS)))
        text, value = f"({text}) {sign} {number}", OPERATIONS[sign](value, number)
    return text, value


@given(expressions())
def test_values_are_exact(expression: tuple[str, Fraction]) -> None:
    text, value = expression
    found = read_expression(text)
    assert found is not None and found.value == value


def test_signs_have_their_usual_order_and_spellings() -> None:
    for text in ("2 + 3 * 4 - 6 / 2", "2 + 3 × 4 \u2212 6 ÷ 2", " 2+[3*4]-(6/2) "):
        found = read_expression(text)
        assert found is not None and found.value == 11
        assert found.numbers == (2, 3, 4, 6, 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "2 ** 9",
        "9 % 2",
        "9 // 2",
        "-3 + 5",
        "1.5 + 2",
        "True + 1",
        "'a' * 9",
        "x + 1",
        "__import__('os').getcwd()",
        "(lambda: 1)()",
        "[1, 2]",
        "1 < 2",
        "1; 2",
        "1\n2",
        "007",
        "1 / (2 - 2)",
        "1 + " * 60 + "1",
        "(" * 150 + "1" + ")" * 40,
        "9" * (LONGEST + 1),
        "\0",
    ],
)
def test_everything_else_is_no_expression(text: str) -> None:
    assert read_expression(text) is None


@given(st.text(alphabet="0123456789+-*/() .eja'\"_\\\n", max_size=60))
def test_no_text_raises(text: str) -> None:
    read_expression(text)
