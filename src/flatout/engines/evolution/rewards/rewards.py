"""What a completion is worth: a number from a text and the facts of its prompt.

A reward is any function `reward(completion, answer) -> float`, where `answer` holds the strings its task
gave with the prompt.  Rewards run in other processes (see `reward_pool`), so they are module-level functions
or frozen dataclasses that say by value what they check.

A reward that says `cheap = True` promises two things: microseconds per call, and an end for every input.
It is called where the rows are, with no process between and no time limit.  A pattern given by a user makes
no such promise (a regular expression can take exponential time), nor does a function of theirs.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Protocol, runtime_checkable

from flatout.engines.evolution.rewards.numeric import Take, answer_in
from flatout.errors import BadInput
from flatout.memory.jobs.user_errors import calling

Row = tuple[str, Mapping[str, str]]  # a completion and the answer that belongs to its prompt


@runtime_checkable
class Reward(Protocol):
    """Scores one completion; higher is better."""

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float: ...


@runtime_checkable
class RewardOfRows(Reward, Protocol):
    """A reward that scores many rows faster together than one by one."""

    def score_rows(self, rows: list[Row]) -> list[float]: ...


def is_cheap(reward: Reward) -> bool:
    """Whether a reward promises to be quick and to end, whatever the completion."""
    return getattr(reward, "cheap", False) is True


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactMatch:
    """1 where the completion is the expected text, spaces around both aside."""

    field: str = "answer"
    ignore_case: bool = False
    cheap: ClassVar[bool] = True

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        given, expected = completion.strip(), answer[self.field].strip()
        if self.ignore_case:
            given, expected = given.casefold(), expected.casefold()
        return float(given == expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericAnswer:
    """1 where the number the completion ends with is the expected one (see `numeric`).

    `tolerance` is relative to the expected value, and absolute below 1.
    """

    field: str = "answer"
    take: Take = "last"
    tolerance: float = 1e-6
    cheap: ClassVar[bool] = True

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        expected = _expected_number(answer[self.field])
        given = answer_in(completion, take=self.take)
        if given is None or given == expected:
            return float(given is not None)
        return float(abs(given - expected) <= self.tolerance * max(1.0, float(abs(expected))))


@functools.lru_cache(maxsize=2**16)  # every member of a population is asked the same
def _expected_number(text: str) -> Fraction:
    number = answer_in(text)
    if number is None:
        raise BadInput(f"the expected answer {text!r} holds no number")
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatMatch:
    """1 where the regular expression is found in the completion; flags are written inside, as in (?s)."""

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise BadInput(f"{self.pattern!r} is no regular expression: {error}") from error

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        return float(re.search(self.pattern, completion) is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedSum:
    """Several rewards as one: the sum of each times its weight."""

    parts: tuple[tuple[float, Reward], ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise BadInput("a sum of rewards needs at least one")
        for weight, _reward in self.parts:
            if not math.isfinite(weight):
                raise BadInput(f"the weight {weight} of a reward is not finite")

    @property
    def cheap(self) -> bool:
        """A sum is as cheap as its dearest part."""
        return all(is_cheap(reward) for _weight, reward in self.parts)

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        return sum(weight * float(reward(completion, answer)) for weight, reward in self.parts)


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A function of the user's, given as `package.module:function`.

    It travels to other processes as its name, and each imports it once.
    """

    name: str

    def __post_init__(self) -> None:
        _function_named(self.name)

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        return _function_named(self.name)(completion, answer)


@functools.cache
def _function_named(name: str) -> Callable[[str, Mapping[str, str]], float]:
    place, _colon, attribute = name.partition(":")
    if not place or not attribute:
        raise BadInput(f"{name!r} names no reward", hint="write it as package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    with calling(f"importing {place}"):
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module is there, and what it imports is not
            raise BadInput(
                f"there is no module {error.name!r} for the reward {name!r}",
                hint="run where its file lies, or put its folder on PYTHONPATH",
            ) from None
    found: object = getattr(module, attribute, None)
    if not callable(found):
        raise BadInput(
            f"{place} has no function {attribute!r}", hint="def reward(completion, answer) -> float"
        )
    return found


def reward_named(name: str) -> Reward:
    """The reward that a name stands for: exact, numeric, bleu, format:PATTERN or package.module:function."""
    if name in ("exact", "numeric"):
        return ExactMatch() if name == "exact" else NumericAnswer()
    if name == "bleu":
        from flatout.engines.evolution.rewards.bleu import Bleu

        return Bleu()
    if name.startswith("format:"):
        return FormatMatch(pattern=name.removeprefix("format:"))
    if ":" not in name:
        raise BadInput(
            f"there is no reward {name!r}",
            hint="known: exact, numeric, bleu, format:PATTERN, package.module:function",
        )
    return NamedReward(name)
