"""The number a text ends with, as a person reads it: 1,234.50, -3/4, $18, "#### 42".

A model that reasons writes many numbers before its answer, so the *last* one counts, unless the text marks
its answer: with "####", as the GSM8K data does, or with \\boxed{...}, as mathematics models do.  Values are
exact fractions: 0.1 + 0.2 is 0.3 here.  The pattern reads any text in linear time, so that no output of a
model, however odd, can hang a run.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

# A minus after a digit, a letter or a closing bracket is an operator: "16-3" ends with 3, not with -3.
_SIGN = r"(?:(?<![\w)\]])[-+\u2212])?"
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(rf"(?P<top>{_SIGN}(?:{_WHOLE}(?:\.[0-9]+)?|\.[0-9]+))(?:/(?P<bottom>[0-9]+))?")
# Every number lies within one of these; a pattern that begins with a set of characters is searched for fast.
_CANDIDATE = re.compile(r"[-+\u2212.0-9][.,/0-9]*")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_MARK = "####"
_MOST_DIGITS = 100  # a longer run of digits is a model stuck in a loop, not a value

Take = Literal["first", "last"]


def number_in(text: str, *, take: Take = "last") -> Fraction | None:
    """The first or last number in `text`; None where there is none that has a value."""
    candidates = list(_CANDIDATE.finditer(text))
    for candidate in candidates if take == "first" else reversed(candidates):
        matches = _NUMBER.finditer(text, candidate.start(), candidate.end())
        values = [value for match in matches if (value := _value(match)) is not None]
        if values:
            return values[0 if take == "first" else -1]
    return None


def answer_in(text: str, *, take: Take = "last") -> Fraction | None:
    """The number that `text` gives as its answer: the marked one, else the first or last one in it.

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
