"""Arithmetic: sums, differences and products of whole numbers.

Nothing can be looked up and every answer is checked exactly, so a score on held-out problems is a skill.
`a + b` and `b + a` are one problem: both are trained on, or both are held out.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from flatout.engines.evolution.rewards.kinds import NumericAnswer, Reward
from flatout.engines.evolution.tasks.task import GeneratedTask, Prompt
from flatout.ground.errors import BadInput

_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic(GeneratedTask):
    """Problems of two numbers with up to `digits` digits."""

    digits: int = 2
    operations: str = "+-"

    name: ClassVar[str] = "arithmetic"
    # A model that goes on after its answer makes up problems of its own: the first number counts.
    reward: ClassVar[Reward] = NumericAnswer(take="first")
    stop: ClassVar[tuple[str, ...]] = ("\n",)

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 18:
            raise BadInput(f"digits={self.digits} is out of range", hint="give 1 to 18")
        if not self.operations or set(self.operations) - set(_OPERATIONS):
            raise BadInput(f"operations={self.operations!r} cannot be used", hint="give some of + - *")

    @property
    def max_new_tokens(self) -> int:
        """A token per digit of the largest answer, its sign, a space and an end of line."""
        return 2 * self.digits + 4

    def draw(self, stream: random.Random) -> Prompt:
        """Draw one problem."""
        sign = stream.choice(self.operations)
        left, right = (stream.randrange(10**self.digits) for _ in range(2))
        first, second = (left, right) if sign == "-" else sorted((left, right))
        return Prompt(
            text=f"Question: What is {left} {sign} {right}?\nAnswer:",
            answer={"answer": str(_OPERATIONS[sign](left, right))},
            key=f"arithmetic {first} {sign} {second}",
        )
