"""Word problems with a number as the answer, in the form of the GSM8K data.

One line is {"question": "...", "answer": "... #### 42"}: the working, then the number behind "####".  A model
may reason as it likes: the number behind its own "####", or else the last one it writes, is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from flatout.engines.evolution.rewards.numeric import answer_in
from flatout.engines.evolution.rewards.rewards import NumericAnswer, Reward
from flatout.engines.evolution.tasks.jsonl import check_template, filled, key_of, read_splits
from flatout.engines.evolution.tasks.splits import ordered_prompts
from flatout.engines.evolution.tasks.task import Prompt, Split
from flatout.errors import BadInput

FIELDS = ("question", "answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gsm8k:
    """Word problems from `path`; held out are those of a second file, or some of the first."""

    path: Path
    heldout: Path | None = None
    template: str = (
        "Solve the problem step by step. End with #### and the answer as a number.\n\n"
        "Problem: {question}\nSolution:"
    )
    max_new_tokens: int = 256
    reward: Reward = field(default_factory=NumericAnswer)
    _train: tuple[Prompt, ...] = field(init=False, repr=False, compare=False)
    _heldout: tuple[Prompt, ...] = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "gsm8k"
    stop: ClassVar[tuple[str, ...]] = ("\n\nProblem:",)

    def __post_init__(self) -> None:
        check_template(self.template, field="question")
        train, heldout = read_splits(self.path, self.heldout, names=FIELDS, make=self._prompt)
        object.__setattr__(self, "_train", train)
        object.__setattr__(self, "_heldout", heldout)

    def _prompt(self, fields: dict[str, str]) -> Prompt:
        number = answer_in(fields["answer"])
        if number is None:
            raise BadInput(
                f"the answer {fields['answer'][-40:]!r} holds no number", hint='end it with "#### 42"'
            )
        return Prompt(
            text=filled(self.template, field="question", value=fields["question"]),
            answer={"answer": str(number)},
            key=f"gsm8k {key_of(fields['question'])}",
        )

    def prompts(self, split: Split, *, epoch: int, count: int, seed: int) -> list[Prompt]:
        """See `Task.prompts`."""
        given = self._train if split == "train" else self._heldout
        return ordered_prompts(given, split=split, epoch=epoch, count=count, seed=seed)
