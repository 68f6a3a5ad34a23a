"""Digit-copy: write the given digits again.

The smallest task that a model can fail at: it needs attention to places and nothing else, so a tiny model
learns it in minutes on a CPU.  The reward is the share of digits that are right, which tells a member that
copies three of four from one that copies none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flatout.engines.evolution.rewards.kinds import Reward
from flatout.engines.evolution.tasks.task import GeneratedTask, Prompt, text_of_ids
from flatout.ground.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedShare:
    """The share of places that hold what they should; what is written beyond the end counts against it."""

    cheap: ClassVar[bool] = True

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        if "token_ids" in answer:
            expected, given = answer["token_ids"].split(), completion.split()
        else:
            line = completion.strip().partition("\n")[0]
            expected, given = list(answer["digits"]), re.findall(r"[0-9]", line)
        num_right = sum(left == right for left, right in zip(expected, given, strict=False))
        return num_right / max(len(expected), len(given))


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitCopy(GeneratedTask):
    """Random digits to copy, as text or, with `token_ids`, as token numbers for a model without a tokenizer.

    Then digit d is token `first_token_id` + d, and the token after 9 separates the digits from their copy.
    """

    length: int = 4
    token_ids: bool = False
    first_token_id: int = 0

    name: ClassVar[str] = "digit-copy"
    reward: ClassVar[Reward] = CopiedShare()

    def __post_init__(self) -> None:
        if self.length < 2:
            raise BadInput(
                f"length={self.length} leaves too few numbers to hold some out", hint="give 2 or more"
            )
        if self.first_token_id < 0:
            raise BadInput(
                f"first_token_id={self.first_token_id} is not a token number", hint="give 0 or more"
            )

    @property
    def max_new_tokens(self) -> int:
        """A token per digit; text may have a space before each, and needs an end of line."""
        return self.length if self.token_ids else 2 * self.length + 2

    @property
    def stop(self) -> tuple[str, ...]:
        return () if self.token_ids else ("\n",)

    def draw(self, stream: random.Random) -> Prompt:
        """Draw one problem."""
        digits = [stream.randrange(10) for _ in range(self.length)]
        written = "".join(map(str, digits))
        key = f"digit-copy {written}"
        if self.token_ids:
            tokens = tuple(self.first_token_id + digit for digit in digits)
            separator = self.first_token_id + 10
            return Prompt(token_ids=(*tokens, separator), answer={"token_ids": text_of_ids(tokens)}, key=key)
        spaced = " ".join(written)
        return Prompt(text=f"Digits: {spaced}\nThe same digits again:", answer={"digits": written}, key=key)
