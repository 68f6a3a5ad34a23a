"""A task: prompts to complete, the facts to check a completion by, and the reward that does it.

Prompts come in two splits.  Training prompts differ from epoch to epoch; held-out prompts stay the same, so
that a curve over epochs compares like with like.  A prompt's split is a hash of its key: one in
`HELD_OUT_ONE_IN` is held out.  So no seed and no epoch ever trains on what is held out, and a prompt that is
found twice in a file is in one split.

A completion reaches the reward as text.  Where a model has no tokenizer, its prompts are token numbers and
its completion is written as those numbers with spaces between them: `text_of_ids`.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from flatout.engines.evolution.rewards.kinds import Reward
from flatout.ground.errors import BadInput
from flatout.ground.user_code import calling

HELD_OUT_ONE_IN = 8
# Draws without a fresh prompt before a generator counts as exhausted.  A split that still had one prompt in
# a thousand to give would be missed once in e^10 times, and costs a repetition.
MOST_DRAWS = 10_000

Split = Literal["train", "heldout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt as text or as token numbers; the other one is None."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    answer: Mapping[str, Any]  # what the reward needs to know besides the text
    key: str  # two prompts that ask the same have the same key

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError(f"the prompt {self.key} needs exactly one of text and token_ids")


class EvolutionTask(Protocol):
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
        """Return the prompts of an epoch: the same for the same arguments, in any process.

        Held-out prompts ignore the epoch, never repeat, and are fewer than `count` where there are no more.
        Training prompts repeat only after all others have been given.
        """


def running(task: EvolutionTask | type[EvolutionTask]) -> AbstractContextManager[None]:
    """Report what a user's task raises as that task's error; errors of Flatout's own tasks stay unchanged."""
    kind = task if isinstance(task, type) else type(task)
    if kind.__module__.partition(".")[0] == "flatout":
        return contextlib.nullcontext()
    return calling(f"the task {title_of(task)}")


def title_of(task: EvolutionTask | type[EvolutionTask]) -> str:
    """Return the name of a task for people: its module and class, as on the command line."""
    kind = task if isinstance(task, type) else type(task)
    return f"{kind.__module__}:{kind.__qualname__}"


def ask_prompts(task: EvolutionTask, split: Split, *, epoch: int, count: int, seed: int) -> list[Prompt]:
    """Ask a task for prompts and check them, because anyone may have written it."""
    with running(task):
        prompts = list(task.prompts(split, epoch=epoch, count=count, seed=seed))
    if not prompts:
        raise BadInput(f"the task {title_of(task)} has no prompt for the split {split!r}")
    for prompt in prompts:
        if not isinstance(prompt, Prompt):
            raise BadInput(
                f"the task {title_of(task)} gives a {type(prompt).__name__} as a prompt",
                hint="make each a Prompt of flatout.evolution",
            )
        if not isinstance(prompt.answer, Mapping):
            raise BadInput(
                f"the task {title_of(task)} gives a {type(prompt.answer).__name__} as the answer of a prompt",
                hint='make it a dict: answer={"target": ...}',
            )
    return prompts


def text_of_ids(token_ids: Iterable[int]) -> str:
    """Write token numbers as a reward sees them where there is no tokenizer: "4 0 7 1"."""
    return " ".join(map(str, token_ids))


def split_of(key: str) -> Split:
    """Return the split of a prompt."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0 else "train"


class GeneratedTask(ABC):
    """A task whose prompts are drawn at random: a subclass names itself and says how to `draw` one."""

    __slots__ = ()

    name: ClassVar[str]

    @abstractmethod
    def draw(self, stream: random.Random) -> Prompt:
        """Draw one prompt of any split from a stream of random numbers."""

    def prompts(self, split: Split, *, epoch: int, count: int, seed: int) -> list[Prompt]:
        """Draw the prompts of an epoch: the same for the same arguments, in any process."""
        lasting = f"{self.name} {seed} {split}" if split == "heldout" else f"{self.name} {seed} {epoch}"
        stream = random.Random(lasting)
        prompts: list[Prompt] = []
        seen: set[str] = set()
        while len(prompts) < count:
            prompt = self._fresh(stream, split=split, seen=seen)
            if prompt is not None:
                seen.add(prompt.key)
                prompts.append(prompt)
            elif not prompts:
                raise BadInput(
                    f"{self.name} has no prompt for the split {split!r}",
                    hint="make its problems larger, or longer",
                )
            elif split == "heldout":
                break
            else:
                seen.clear()
        return prompts

    def _fresh(self, stream: random.Random, *, split: Split, seen: set[str]) -> Prompt | None:
        for _ in range(MOST_DRAWS):
            prompt = self.draw(stream)
            if prompt.key not in seen and split_of(prompt.key) == split:
                return prompt
        return None


def ordered_prompts(
    prompts: Sequence[Prompt], *, split: Split, epoch: int, count: int, seed: int
) -> list[Prompt]:
    """Return `count` of the given prompts, all of one split, as `EvolutionTask.prompts` promises.

    Training goes through all of them in a random order, then through another one: epoch e takes up where
    e - 1 ended, given that both ask for the same count.
    """
    if split == "heldout":
        return [prompts[place] for place in _order(len(prompts), seed=seed, label="heldout")[:count]]
    taken: list[Prompt] = []
    position = epoch * count
    while prompts and len(taken) < count:
        lap, start = divmod(position, len(prompts))
        order = _order(len(prompts), seed=seed, label=f"lap {lap}")[start : start + count - len(taken)]
        taken += [prompts[place] for place in order]
        position += len(order)
    return taken


def _order(size: int, *, seed: int, label: str) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed} {label}").shuffle(order)
    return order
