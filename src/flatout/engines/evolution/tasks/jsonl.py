"""Prompts from a file with one JSON object per line.

A file is read once, when its task is made, and every line is checked then: a run must not find the bad line
in its third hour.  Prompts may be held out from the file itself, or come from a second file; a prompt that
is in both is left out of training.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from flatout.engines.evolution.rewards.kinds import Reward
from flatout.engines.evolution.tasks.task import Prompt, Split, ordered_prompts, split_of
from flatout.errors import BadInput

Fields = dict[str, str]
MakePrompt = Callable[[Fields], Prompt]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileTask:
    """A task with a prompt per line of `path`; held out are those of a second file, or some of the first.

    A subclass names the fields of a line; the first of them goes where the template has {it}.
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
    def answer(self, fields: Fields) -> Fields:
        """What the reward needs to know of a line; BadInput for a line that cannot be used."""

    def prompts(self, split: Split, *, epoch: int, count: int, seed: int) -> list[Prompt]:
        """See `EvolutionTask.prompts`."""
        given = self._train if split == "train" else self._heldout
        return ordered_prompts(given, split=split, epoch=epoch, count=count, seed=seed)

    def _prompt(self, fields: Fields) -> Prompt:
        asked = self.fields[0]
        # Other braces of a template stay as they are.
        text = self.template.replace(f"{{{asked}}}", fields[asked])
        return Prompt(text=text, answer=self.answer(fields), key=f"{self.name} {_short(fields[asked])}")


def read_fields(path: Path, *, names: Sequence[str]) -> list[tuple[int, Fields]]:
    """Line number and the named fields of every line that is not empty."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}", hint="give a UTF-8 text file") from error
    found = [(number, _fields(line, names, f"{path}:{number}")) for number, line in _numbered(lines)]
    if not found:
        raise BadInput(f"{path} is empty", hint=f"give lines of {_shape(names)}")
    return found


def _numbered(lines: list[str]) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _fields(line: str, names: Sequence[str], place: str) -> Fields:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"{place} is not JSON: {error}", hint=f"give lines of {_shape(names)}") from error
    if not isinstance(record, dict):
        raise BadInput(
            f"{place} is {type(record).__name__}, not an object", hint=f"give lines of {_shape(names)}"
        )
    for name in names:
        value = record.get(name)
        if not isinstance(value, str) or not value.strip():
            what = "is missing" if name not in record else f"is {value!r}, not a text"
            raise BadInput(f"{place}: {name!r} {what}", hint=f"give lines of {_shape(names)}")
    return {name: record[name] for name in names}


def _shape(names: Sequence[str]) -> str:
    return json.dumps(dict.fromkeys(names, "..."))


def read_splits(
    path: Path, heldout: Path | None, *, names: Sequence[str], make: MakePrompt
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Training and held-out prompts: of two files, or one file divided; no key is in both."""
    prompts = _prompts(path, names=names, make=make)
    if heldout is not None:
        kept_out = _prompts(heldout, names=names, make=make)
        keys = {prompt.key for prompt in kept_out}
        train = tuple(prompt for prompt in prompts if prompt.key not in keys)
        if not train:
            raise BadInput(
                f"every prompt of {path} is also in {heldout}",
                hint="leave the second out to divide the first",
            )
        return train, tuple(_distinct(kept_out))
    kept_out = [prompt for prompt in prompts if split_of(prompt.key) == "heldout"]
    train = tuple(prompt for prompt in prompts if split_of(prompt.key) == "train")
    if not train or not kept_out:
        raise BadInput(
            f"{path} has too few different prompts ({len(prompts)}) to hold some out",
            hint="give more of them, or a second file to hold out",
        )
    return train, tuple(_distinct(kept_out))


def _prompts(path: Path, *, names: Sequence[str], make: MakePrompt) -> list[Prompt]:
    prompts = []
    for number, fields in read_fields(path, names=names):
        try:
            prompts.append(make(fields))
        except BadInput as error:
            raise BadInput(f"{path}:{number}: {error.message}", hint=error.hint) from error
    return prompts


def _distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    return list({prompt.key: prompt for prompt in prompts}.values())


def _short(text: str) -> str:
    """A short name for a text; spaces do not matter."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8).hexdigest()
