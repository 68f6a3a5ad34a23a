"""The value of an arithmetic expression that a model wrote, without running it.

Python's own parser turns the text into a tree, and only whole numbers, + - * / and brackets are understood
in it: a name, a call, a power or anything else makes the text no expression.  Values are exact fractions.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 200  # characters; beyond it, a text is a model that lost its way
_SIGNS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SPELLINGS = str.maketrans({"×": "*", "\u00f7": "/", "\u2212": "-", "\u22c5": "*", "[": "(", "]": ")"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Expression:
    """The value, and the numbers it was made of in the order they were written."""

    value: Fraction
    numbers: tuple[int, ...]


def read_expression(text: str) -> Expression | None:
    """The expression that `text` is; None where it is anything else, or has no value."""
    if len(text) > LONGEST:
        return None
    try:
        tree = ast.parse(text.strip().translate(_SPELLINGS), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    numbers: list[int] = []
    try:
        value = _value(tree, numbers)
    except (_NotArithmetic, ZeroDivisionError):
        return None
    return Expression(value=value, numbers=tuple(numbers))


class _NotArithmetic(Exception):
    pass


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            numbers.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SIGNS:
            first, second = _value(left, numbers), _value(right, numbers)
            return _SIGNS[type(sign)](first, second)
    raise _NotArithmetic
