"""A task: prompts to complete, the facts to check a completion by, and the reward that does it.

Prompts come in two splits.  Training prompts differ from epoch to epoch; held-out prompts stay the same, so
that a curve over epochs compares like with like.  Which split a prompt belongs to depends on the prompt
alone (see `splits`): no seed and no epoch ever trains on what is held out.

A completion reaches the reward as text.  Where a model has no tokenizer, its prompts are token numbers and
its completion is written as those numbers with spaces between them: `text_of_ids`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from flatout.engines.evolution.rewards.rewards import Reward

Split = Literal["train", "heldout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What a model is asked, as text or as token numbers; the other one is None."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    answer: Mapping[str, str]  # what the reward needs to know
    key: str  # two prompts that ask the same have the same key

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError(f"the prompt {self.key} is either a text or token numbers")


class Task(Protocol):
    """Where prompts come from and what their completions are worth."""

    @property
    def name(self) -> str: ...

    @property
    def reward(self) -> Reward: ...

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a completion; empty where only its length does."""

    def prompts(self, split: Split, *, epoch: int, count: int, seed: int) -> list[Prompt]:
        """The prompts of an epoch: the same for the same arguments, in any process.

        Held-out prompts ignore the epoch, never repeat, and are fewer than `count` where there are no more.
        Training prompts repeat only after all others have been given.
        """


def text_of_ids(token_ids: Iterable[int]) -> str:
    """How a completion without a tokenizer is shown to a reward: "4 0 7 1"."""
    return " ".join(map(str, token_ids))
