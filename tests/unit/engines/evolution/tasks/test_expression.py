"""Arithmetic is computed; anything else is not even looked at."""

from __future__ import annotations

import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.evolution.tasks.expression import LONGEST, read_expression

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
