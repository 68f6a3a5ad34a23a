"""Countdown: reach a target from given numbers with + - * /, each number used once.

Easy to check and hard to guess, which makes it a favourite for learning from rewards alone.  Each problem is
made from a solution, by joining two numbers at random until one is left, so every problem can be solved.

What a model wrote is never run.  Python's own parser turns the text into a tree, and only whole numbers,
+ - * / and brackets are understood in it: a name, a call, a power or anything else makes the text no
expression.  Values are exact fractions.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from flatout.engines.evolution.rewards.kinds import Reward
from flatout.engines.evolution.tasks.task import GeneratedTask, Prompt
from flatout.ground.errors import BadInput

LONGEST = 200  # characters; beyond it, a text is a model that lost its way
_SIGNS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SPELLINGS = str.maketrans({"×": "*", "\u00f7": "/", "\u2212": "-", "\u22c5": "*", "[": "(", "]": ")"})
_ANSWER = re.compile(r"<answer>([^<>]*)")  # a generation that stops at </answer> may leave it out


@dataclass(frozen=True, kw_only=True, slots=True)
class CountdownReward:
    """1 for a solution; `format_credit` for an expression of the right numbers with another value.

    The expression is what stands between the last <answer> and </answer>, or else the first line; an
    "= 24" after it is left aside.
    """

    format_credit: float = 0.1
    cheap: ClassVar[bool] = True

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        expression = _written(completion)
        numbers = sorted(map(int, answer["numbers"].split()))
        if expression is None or sorted(expression.numbers) != numbers:
            return 0.0
        return 1.0 if expression.value == int(answer["target"]) else self.format_credit


def _written(completion: str) -> Expression | None:
    marked = _ANSWER.findall(completion)
    text = marked[-1] if marked else completion.strip().partition("\n")[0]
    return read_expression(text.partition("=")[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Countdown(GeneratedTask):
    """Problems of `num_numbers` numbers between 1 and `largest`, with a target up to `largest_target`.

    With `reasoning` the model is asked to think before it answers, and needs more tokens for that.
    """

    num_numbers: int = 4
    largest: int = 25
    largest_target: int = 100
    format_credit: float = 0.1
    reasoning: bool = False
    max_new_tokens: int = 64

    name: ClassVar[str] = "countdown"

    def __post_init__(self) -> None:
        if not 2 <= self.num_numbers <= 8:
            raise BadInput(f"num_numbers={self.num_numbers} is out of range", hint="give 2 to 8")
        if self.largest < 4 or self.largest_target < 10:
            raise BadInput(
                f"largest={self.largest}, largest_target={self.largest_target} leave too few problems",
                hint="give at least 4 and 10",
            )

    @property
    def reward(self) -> Reward:
        return CountdownReward(format_credit=self.format_credit)

    @property
    def stop(self) -> tuple[str, ...]:
        return ("</answer>",) if self.reasoning else ("\n",)

    @property
    def _request(self) -> str:
        if self.reasoning:
            return "Think step by step, then give the expression between <answer> and </answer>.\n"
        return "Expression:"

    def draw(self, stream: random.Random) -> Prompt:
        """Draw one problem."""
        while True:
            numbers = [stream.randint(1, self.largest) for _ in range(self.num_numbers)]
            target, solution = _joined(numbers, stream)
            if 1 <= target <= self.largest_target:
                break
        given = " ".join(map(str, numbers))
        return Prompt(
            text=(
                f"Use each of the numbers {given} exactly once, with + - * / and brackets, "
                f"to write an expression that equals {target}.\n{self._request}"
            ),
            answer={"numbers": given, "target": str(target), "solution": solution},
            # The same numbers in another order are the same problem.
            key=f"countdown {' '.join(map(str, sorted(numbers)))} = {target}",
        )


def _joined(numbers: list[int], stream: random.Random) -> tuple[int, str]:
    """Make a value from the numbers, and say how: only positive whole numbers on the way."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        (left, left_text), (right, right_text) = (parts.pop(stream.randrange(len(parts))) for _ in range(2))
        if left < right:
            left, left_text, right, right_text = right, right_text, left, left_text
        made = {"+": left + right, "*": left * right}
        if left > right:
            made["-"] = left - right
        if left % right == 0:
            made["/"] = left // right
        sign = stream.choice(sorted(made))
        parts.append((made[sign], f"({left_text} {sign} {right_text})"))
    (value, text) = parts[0]
    return value, text.removeprefix("(").removesuffix(")")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expression:
    """The value, and the numbers it was made of in the order they were written."""

    value: Fraction
    numbers: tuple[int, ...]


def read_expression(text: str) -> Expression | None:
    """Read `text` as an expression; None if it is not one, or has no value."""
    if len(text) > LONGEST:
        return None
    try:
        tree = ast.parse(text.strip().translate(_SPELLINGS), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    numbers: list[int] = []
    try:
        value = _value(tree, numbers)
    except (_NotArithmetic, ZeroDivisionError):
        return None
    return Expression(value=value, numbers=tuple(numbers))


class _NotArithmetic(Exception):
    pass


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            numbers.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SIGNS:
            first, second = _value(left, numbers), _value(right, numbers)
            return _SIGNS[type(sign)](first, second)
    raise _NotArithmetic
