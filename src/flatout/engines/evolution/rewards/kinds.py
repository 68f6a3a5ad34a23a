"""What a completion is worth: a number from a text and the facts of its prompt.

A reward is any function `reward(completion, answer) -> float`, where `answer` holds what its task gave with
the prompt, and the prompt itself.  `make_reward` turns other forms into this one.  Rewards run in other
processes (see `pool`), so they are module-level functions or frozen dataclasses that say by value what they
check.

A reward with `cheap = True` promises two things: microseconds per call, and an end for every input.  It is
called in the run's own process, without a time limit.  A user's pattern makes no such promise (a regular
expression can take exponential time), nor does a user's function.

A number is read as a person reads it: 1,234.50, -3/4, $18.  A model that reasons writes many numbers before
its answer, so the *last* one counts, unless the text marks its answer: with "####", as the GSM8K data does,
or with \\boxed{...}, as mathematics models do.  Values are exact fractions: 0.1 + 0.2 is 0.3 here.  The
pattern reads any text in linear time, so that no output of a model, however odd, can hang a run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from flatout.ground.errors import BadInput

# A minus after a digit, a letter or a closing bracket is an operator: "16-3" ends with 3, not with -3.
_SIGN = r"(?:(?<![\w)\]])[-+\u2212])?"
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(rf"(?P<top>{_SIGN}(?:{_WHOLE}(?:\.[0-9]+)?|\.[0-9]+))(?:/(?P<bottom>[0-9]+))?")
# Every number lies within one of these; a pattern that begins with a set of characters is searched for fast.
_CANDIDATE = re.compile(r"[-+\u2212.0-9][.,/0-9]*")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_MARK = "####"
_MOST_DIGITS = 100  # a longer run of digits is a model stuck in a loop, not a value

PROMPT = "prompt"  # the name under which an answer holds the prompt's own text
Take = Literal["first", "last"]
AnsweredRow = tuple[str, Mapping[str, Any]]  # a completion and the answer that belongs to its prompt


class NotOnePerRow(ValueError):
    """A function of many rows did not return a list with a reward for each."""


@runtime_checkable
class Reward(Protocol):
    """Scores one completion; higher is better, and None says that it is not for this row."""

    def __call__(self, completion: str, answer: Mapping[str, Any], /) -> float | None: ...


@runtime_checkable
class RewardOfAnswers(Reward, Protocol):
    """A reward that can refuse an unusable answer before a run."""

    def check_answer(self, answer: Mapping[str, Any]) -> None:
        """Raise BadInput if no completion can be scored against `answer`."""


@runtime_checkable
class RewardOfRows(Reward, Protocol):
    """A reward that scores many rows faster together than one by one."""

    def score_rows(self, rows: list[AnsweredRow]) -> Sequence[float | None]: ...


def is_cheap(reward: Reward) -> bool:
    """Return whether a reward promises to be quick and to end, whatever the completion."""
    return getattr(reward, "cheap", False) is True


def expected_text(answer: Mapping[str, Any], field: str | None, *, usual: str = "answer") -> str:
    """Return the text to compare a completion with: `field`, else the only one, else the usual one."""
    facts = [name for name in answer if name != PROMPT]
    if field is None:
        field = facts[0] if len(facts) == 1 else usual
    if field not in answer:
        raise BadInput(
            f"the answer has no {field!r} to compare with: it has {', '.join(facts) or 'nothing'}",
            hint="use another reward, or one that names its field",
        )
    expected = answer[field]
    if not isinstance(expected, (str, int, float)):
        raise BadInput(f"{field!r} is {expected!r}, neither a text nor a number", hint="use another reward")
    return str(expected)


def check_answer(reward: Reward, answer: Mapping[str, Any]) -> None:
    """Raise BadInput if a reward knows that it cannot score any completion against `answer`."""
    if isinstance(reward, RewardOfAnswers):
        reward.check_answer(answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactMatch:
    """1 if the completion equals the expected text, ignoring spaces around both."""

    field: str | None = None  # None: see `expected_text`
    ignore_case: bool = False
    cheap: ClassVar[bool] = True

    def check_answer(self, answer: Mapping[str, Any]) -> None:
        """Raise BadInput if the answer has no text to compare with."""
        expected_text(answer, self.field)

    def __call__(self, completion: str, answer: Mapping[str, Any], /) -> float:
        given, expected = completion.strip(), expected_text(answer, self.field).strip()
        if self.ignore_case:
            given, expected = given.casefold(), expected.casefold()
        return float(given == expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericAnswer:
    """1 if the number that the completion ends with is the expected one.

    `tolerance` is relative to the expected value, and absolute below 1.
    """

    field: str | None = None  # None: see `expected_text`
    take: Take = "last"
    tolerance: float = 1e-6
    cheap: ClassVar[bool] = True

    def check_answer(self, answer: Mapping[str, Any]) -> None:
        """Raise BadInput if the answer holds no number to compare with."""
        _expected_number(expected_text(answer, self.field))

    def __call__(self, completion: str, answer: Mapping[str, Any], /) -> float:
        expected = _expected_number(expected_text(answer, self.field))
        given = answer_in(completion, take=self.take)
        if given is None or given == expected:
            return float(given is not None)
        return float(abs(given - expected) <= self.tolerance * max(1.0, float(abs(expected))))


@functools.lru_cache(maxsize=2**16)  # every member of a population is asked the same
def _expected_number(text: str) -> Fraction:
    number = answer_in(text)
    if number is None:
        raise BadInput(f"the expected answer {text[-40:]!r} holds no number", hint="use another reward")
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatMatch:
    """1 if the regular expression matches in the completion; write flags inside it, as in (?s)."""

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise BadInput(f"{self.pattern!r} is not a regular expression: {error}") from error

    def __call__(self, completion: str, answer: Mapping[str, Any], /) -> float:
        return float(re.search(self.pattern, completion) is not None)


def number_in(text: str, *, take: Take = "last") -> Fraction | None:
    """Return the first or last number in `text`; None if no number has a value."""
    candidates = list(_CANDIDATE.finditer(text))
    for candidate in candidates if take == "first" else reversed(candidates):
        matches = _NUMBER.finditer(text, candidate.start(), candidate.end())
        values = [value for match in matches if (value := _value(match)) is not None]
        if values:
            return values[0 if take == "first" else -1]
    return None


def answer_in(text: str, *, take: Take = "last") -> Fraction | None:
    """Return the number that `text` gives as its answer: the marked one, else the first or last.

    A mark without a number is an answer that cannot be read, so that the working before it does not count.
    """
    _before, mark, marked = text.rpartition(_MARK)
    if mark:
        return number_in(marked.lstrip().partition("\n")[0], take="first")
    if boxed := _BOXED.findall(text):
        return number_in(boxed[-1], take=take)
    return number_in(text, take=take)


def _value(match: re.Match[str]) -> Fraction | None:
    top, bottom = match["top"].replace(",", "").replace("\u2212", "-"), match["bottom"]
    if len(top) > _MOST_DIGITS or len(bottom or "") > _MOST_DIGITS:
        return None
    value = Fraction(top) if "." in top else Fraction(int(top))
    if bottom is None:
        return value
    return value / int(bottom) if int(bottom) else None
