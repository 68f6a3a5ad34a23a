"""Rewards as users give them, made into rewards that the pool can call.

    exact, numeric, bleu, format:PATTERN      by name
    package.module:function                   a user's function (file.py:function), or the function itself
    {exact: 1.0, my_rewards:brevity: 0.2}     several with their weights; a list counts each once

A function has one of two forms, told apart by its parameters:

    def reward(completion, answer) -> float                     one row at a time; `answer` has every column
    def reward(prompts, completions, **columns) -> list         many rows at once, as TRL's trainers call it

A call gets some of the rows: they go to several processes in chunks, so a row must be scored by itself.  A
None among the rewards says that the reward does not apply to a row: it adds nothing to a sum.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.engines.evolution.rewards.kinds import (
    PROMPT,
    AnsweredRow,
    ExactMatch,
    FormatMatch,
    NotOnePerRow,
    NumericAnswer,
    Reward,
    RewardOfRows,
    check_answer,
    is_cheap,
)
from flatout.ground.errors import BadInput
from flatout.ground.user_code import defined_at, import_named

FORMS = "def reward(completion, answer) -> float, or def reward(prompts, completions, **columns) -> list"
KNOWN = "known: exact, numeric, bleu, format:PATTERN, package.module:function"
OF_ROWS = ("prompts", "completions")


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A user's function, given as `package.module:function`.

    It is sent to other processes by its name, and each imports it once.
    """

    name: str

    def __post_init__(self) -> None:
        _function_named(self.name)

    def __call__(self, *given: Any, **columns: Any) -> Any:
        return _function_named(self.name)(*given, **columns)


@dataclass(frozen=True, slots=True)
class BatchReward:
    """A function `f(prompts, completions, **columns)` that returns a reward per row, as TRL has them."""

    function: Callable[..., Sequence[float | None]]

    def check_answer(self, answer: Mapping[str, Any]) -> None:
        """Raise BadInput if the function takes a column that a row does not have."""
        wanted = [
            name
            for name, parameter in _parameters(self.function).items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        for name in wanted:
            if name not in (*OF_ROWS, *answer) or name == PROMPT:
                raise BadInput(
                    f"the reward {name_of(self.function)} takes {name!r}, and a row has no such column",
                    hint=f"it has {', '.join((*OF_ROWS, *(each for each in answer if each != PROMPT)))}",
                )

    def __call__(self, completion: str, answer: Mapping[str, Any], /) -> float | None:
        return self.score_rows([(completion, answer)])[0]

    def score_rows(self, rows: list[AnsweredRow]) -> Sequence[float | None]:
        """Call the function once for all rows; without **columns it gets the columns that it names."""
        names = dict.fromkeys(name for _, answer in rows for name in answer if name != PROMPT)
        given = {
            **{name: [answer.get(name) for _, answer in rows] for name in names},
            "prompts": [answer.get(PROMPT) for _, answer in rows],
            "completions": [completion for completion, _ in rows],
        }
        parameters = _parameters(self.function)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {name: values for name, values in given.items() if name in parameters}
        returned: Any = self.function(**given)  # whatever a user's function gives back
        if isinstance(returned, str) or not isinstance(returned, Iterable):
            raise self._not_one_per_row(f"{str(returned)[:60]!r}, not a list of rewards")
        rewards = list(returned)
        if len(rewards) != len(rows):
            raise self._not_one_per_row(f"{len(rewards)} rewards for {len(rows)} completions")
        return rewards

    def _not_one_per_row(self, what: str) -> NotOnePerRow:
        place = defined_at(_called(self.function))
        return NotOnePerRow(f"{name_of(self.function)} returned {what} ({place})")


@dataclass(frozen=True, slots=True)
class WeightedRewards:
    """The sum of several rewards, each times its weight."""

    parts: tuple[tuple[Reward, float], ...]

    @property
    def cheap(self) -> bool:
        return all(is_cheap(reward) for reward, _ in self.parts)

    def check_answer(self, answer: Mapping[str, Any]) -> None:
        """Raise BadInput if one of the rewards cannot use the answer."""
        for reward, _ in self.parts:
            check_answer(reward, answer)

    def __call__(self, completion: str, answer: Mapping[str, Any], /) -> float | None:
        return self.score_rows([(completion, answer)])[0]

    def score_rows(self, rows: list[AnsweredRow]) -> list[float | None]:
        """Return the sums of many rows; None for a row to which no reward applies."""
        by_part = [
            (
                weight,
                reward.score_rows(rows) if isinstance(reward, RewardOfRows) else [reward(*r) for r in rows],
            )
            for reward, weight in self.parts
        ]
        sums: list[float | None] = []
        for number in range(len(rows)):
            known = [(weight, scores[number]) for weight, scores in by_part if scores[number] is not None]
            sums.append(sum(weight * float(score) for weight, score in known if score is not None))
            if not known:
                sums[-1] = None
        return sums


def make_reward(given: object) -> Reward:
    """Make a reward from a name, a function, several of them, or a table of weights."""
    if isinstance(given, str):
        return reward_by_name(given)
    if isinstance(given, Mapping):
        return _weighted(list(given.items()))
    if isinstance(given, (list, tuple)):
        return _weighted([(each, 1.0) for each in given])
    if not callable(given):
        raise BadInput(f"{given!r} is not a reward", hint=f"{KNOWN}; or {FORMS}")
    return _by_parameters(given)


def reward_by_name(name: str) -> Reward:
    """Return the reward of a name: exact, numeric, bleu, format:PATTERN or package.module:function."""
    if name in ("exact", "numeric"):
        return ExactMatch() if name == "exact" else NumericAnswer()
    if name == "bleu":
        from flatout.engines.evolution.rewards.bleu import Bleu

        return Bleu()
    if name.startswith("format:"):
        return FormatMatch(pattern=name.removeprefix("format:"))
    if ":" not in name:
        raise BadInput(f"there is no reward {name!r}", hint=KNOWN)
    return _by_parameters(NamedReward(name))


def name_of(function: object) -> str:
    """Return the name of a function for people: package.module:function."""
    if isinstance(function, NamedReward):
        return function.name
    return (
        f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"
    )


def _weighted(parts: Sequence[tuple[object, object]]) -> WeightedRewards:
    if not parts:
        raise BadInput("no reward is given", hint=KNOWN)
    for given, weight in parts:
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise BadInput(
                f"the weight of {given!r} is {weight!r}, not a finite number", hint="reward: {exact: 1.0}"
            )
    return WeightedRewards(tuple((make_reward(given), float(weight)) for given, weight in parts))  # type: ignore[arg-type]


def _by_parameters(function: Callable[..., Any]) -> Reward:
    parameters = _parameters(function)
    if "completions" in parameters:
        return BatchReward(function)
    try:
        inspect.Signature(list(parameters.values())).bind("", {})
    except TypeError:
        shown = ", ".join(map(str, parameters.values()))
        raise BadInput(f"the reward {name_of(function)} takes ({shown})", hint=FORMS) from None
    return function


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(_called(function)).parameters
    except (TypeError, ValueError):  # a function in C may not say: it is called with a row
        kind = inspect.Parameter.POSITIONAL_ONLY
        return {name: inspect.Parameter(name, kind) for name in ("completion", "answer")}


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    return _function_named(function.name) if isinstance(function, NamedReward) else function


@functools.cache
def _function_named(name: str) -> Callable[..., Any]:
    found: object = import_named(name, what="reward")
    if not callable(found):
        raise BadInput(f"the reward {name!r} is not a function", hint=FORMS)
    return found
