"""Prompts from a file with a row for each.

A file is read and checked once, when its task is made.  Held-out prompts come from the same file or from a
second one; a prompt that is in both is left out of training.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from flatout.engines.evolution.rewards.kinds import Reward, check_answer
from flatout.engines.evolution.tasks.task import Prompt, Split, ordered_prompts, split_of
from flatout.engines.run.row_files import read_rows
from flatout.ground.errors import BadInput

Fields = Mapping[str, Any]
MakePrompt = Callable[[Fields], Prompt]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileTask:
    """A task with a prompt per line of `path`; held-out prompts are those of a second file, or some of it.

    A subclass names the fields that a line has as texts; the first of them goes where the template has {it}.
    """

    path: Path
    heldout: Path | None = None
    template: str
    max_new_tokens: int
    reward: Reward
    _train: tuple[Prompt, ...] = field(init=False, repr=False, compare=False)
    _heldout: tuple[Prompt, ...] = field(init=False, repr=False, compare=False)

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        asked = f"{{{self.fields[0]}}}"
        if asked not in self.template:
            raise BadInput(
                f"the template {self.template!r} has no {asked}", hint=f"write {asked} where it goes"
            )
        train, heldout = read_splits(self.path, self.heldout, names=self.fields, make=self._prompt)
        object.__setattr__(self, "_train", train)
        object.__setattr__(self, "_heldout", heldout)

    @abstractmethod
    def answer(self, fields: Fields) -> Mapping[str, Any]:
        """Return what the reward needs to know of a line; BadInput for a line that cannot be used."""

    def prompts(self, split: Split, *, epoch: int, count: int, seed: int) -> list[Prompt]:
        """Return the prompts of an epoch: the same for the same arguments, in any process."""
        given = self._train if split == "train" else self._heldout
        return ordered_prompts(given, split=split, epoch=epoch, count=count, seed=seed)

    def _prompt(self, fields: Fields) -> Prompt:
        asked = self.fields[0]
        # Other braces of a template stay as they are.
        text = self.template.replace(f"{{{asked}}}", fields[asked])
        answer = self.answer(fields)
        check_answer(self.reward, answer)
        return Prompt(text=text, answer=answer, key=f"{self.name} {_short(fields[asked])}")


def read_splits(
    path: Path, heldout: Path | None, *, names: Sequence[str], make: MakePrompt
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Read training and held-out prompts, from two files or one divided; no key is in both."""
    prompts = _prompts(path, names=names, make=make)
    if heldout is not None:
        kept_out = _prompts(heldout, names=names, make=make)
        keys = {prompt.key for prompt in kept_out}
        train = tuple(prompt for prompt in prompts if prompt.key not in keys)
        if not train:
            raise BadInput(
                f"every prompt of {path} is also in {heldout}",
                hint="omit the second file to divide the first",
            )
        return train, tuple(_distinct(kept_out))
    kept_out = [prompt for prompt in prompts if split_of(prompt.key) == "heldout"]
    train = tuple(prompt for prompt in prompts if split_of(prompt.key) == "train")
    if not train or not kept_out:
        num_different = len({prompt.key for prompt in prompts})
        raise BadInput(
            f"{path} has too few different prompts ({num_different}) to hold some out",
            hint="give more of them, or a second file to hold out",
        )
    return train, tuple(_distinct(kept_out))


def _prompts(path: Path, *, names: Sequence[str], make: MakePrompt) -> list[Prompt]:
    hint = f"give lines of {json.dumps(dict.fromkeys(names, '...'))}"
    return read_rows(path, read=lambda row: make(_checked(row, names)), hint=hint)


def _checked(row: Fields, names: Sequence[str]) -> Fields:
    for name in names:
        value = row.get(name)
        if not isinstance(value, str) or not value.strip():
            what = "is missing" if name not in row else f"is {value!r}, not a text"
            raise BadInput(f"{name!r} {what}")
    return row


def _distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    return list({prompt.key: prompt for prompt in prompts}.values())


def _short(text: str) -> str:
    """Return a short name for a text; spaces do not matter."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8).hexdigest()
