"""Word problems with a number as the answer, in the form of the GSM8K data.

One line is {"question": "...", "answer": "... #### 42"}: the working, then the number behind "####".  A model
may reason as it likes: the number behind its own "####", or else the last one it writes, is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from flatout.engines.evolution.rewards.kinds import NumericAnswer, Reward, answer_in
from flatout.engines.evolution.tasks.jsonl import Fields, FileTask
from flatout.ground.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Gsm8k(FileTask):
    """Word problems of a file."""

    template: str = (
        "Solve the problem step by step. End with #### and the answer as a number.\n\n"
        "Problem: {question}\nSolution:"
    )
    max_new_tokens: int = 256
    reward: Reward = field(default_factory=NumericAnswer)

    name: ClassVar[str] = "gsm8k"
    fields: ClassVar[tuple[str, ...]] = ("question", "answer")
    stop: ClassVar[tuple[str, ...]] = ("\n\nProblem:",)

    def answer(self, fields: Fields) -> dict[str, str]:
        """Return the number alone."""
        number = answer_in(fields["answer"])
        if number is None:
            raise BadInput(
                f"the answer {fields['answer'][-40:]!r} holds no number", hint='end it with "#### 42"'
            )
        return {"answer": str(number)}
