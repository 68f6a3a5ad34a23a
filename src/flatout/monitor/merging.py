"""Many samples as one of a longer span: a minute of a log, an hour, or the window a verdict looks at.

Each field merges by the rule that `sample.py` gives it.  A mean is weighted by the seconds each sample
stands for, over those that knew the value: a GPU that was lost for half a minute has the mean of the other
half, not half the mean.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from flatout.monitor.sample import Sample

Row = TypeVar("Row")
MOST_NOTES = 16
UNWEIGHTED_S = 1.0  # a first sample has no span


def merge(samples: Sequence[Sample]) -> Sample:
    """One sample for all of them; they are in order of time and there is at least one."""
    if len(samples) == 1:
        return samples[0]
    first, last = samples[0], samples[-1]
    merged = _merged(samples, [sample.span_s or UNWEIGHTED_S for sample in samples])
    span_s = last.time_s - first.time_s + (first.span_s or 0.0)
    return dataclasses.replace(merged, time_s=last.time_s, span_s=span_s, notes=merged.notes[-MOST_NOTES:])


@functools.cache
def _plan(shape: type) -> tuple[tuple[str, str], ...]:
    """(field, rule) of a dataclass."""
    hints = typing.get_type_hints(shape)
    return tuple(
        (field.name, field.metadata.get("merge") or _rule_of(hints[field.name]))
        for field in dataclasses.fields(shape)
    )


def _rule_of(hint: Any) -> str:
    kinds = typing.get_args(hint) if typing.get_origin(hint) is not tuple else ()
    kinds = kinds or (hint,)
    if float in kinds:
        return "mean"
    if any(typing.get_args(kind) == (str, float) for kind in kinds):
        return "means"
    if any(dataclasses.is_dataclass(kind) for kind in kinds):
        return "nested"
    if typing.get_origin(hint) is tuple and dataclasses.is_dataclass(typing.get_args(hint)[0]):
        return "rows"
    return "last"


def _merged(values: Sequence[Row], weights: Sequence[float]) -> Row:
    shape: Any = type(values[0])
    return typing.cast(
        Row,
        shape(
            **{
                name: _RULES[rule]([getattr(value, name) for value in values], weights)
                for name, rule in _plan(shape)
            }
        ),
    )


def _known(values: Sequence[Any], weights: Sequence[float]) -> list[tuple[Any, float]]:
    return [pair for pair in zip(values, weights, strict=True) if pair[0] is not None]


def _mean(values: Sequence[Any], weights: Sequence[float]) -> float | None:
    known = _known(values, weights)
    return sum(value * weight for value, weight in known) / sum(w for _, w in known) if known else None


def _means(values: Sequence[Any], weights: Sequence[float]) -> dict[str, float] | None:
    known = _known(values, weights)
    if not known:
        return None
    total = sum(weight for _, weight in known)
    names = dict.fromkeys(name for value, _ in known for name in value)
    return {name: sum(value.get(name, 0.0) * weight for value, weight in known) / total for name in names}


def _last(values: Sequence[Any], weights: Sequence[float]) -> Any:
    return next((value for value in reversed(values) if value is not None), None)


def _peak(values: Sequence[Any], weights: Sequence[float]) -> Any:
    return max((value for value, _ in _known(values, weights)), default=None)


def _every(values: Sequence[Any], weights: Sequence[float]) -> tuple[str, ...] | None:
    known = _known(values, weights)
    return tuple(dict.fromkeys(text for value, _ in known for text in value)) if known else None


def _nested(values: Sequence[Any], weights: Sequence[float]) -> Any:
    known = _known(values, weights)
    return _merged([value for value, _ in known], [weight for _, weight in known]) if known else None


def _rows(values: Sequence[Any], weights: Sequence[float]) -> tuple[Any, ...]:
    """Rows of the same key are one row, in the order in which they first appeared."""
    by_key: dict[Any, tuple[list[Any], list[float]]] = {}
    for rows, weight in zip(values, weights, strict=True):
        for row in rows:
            found, weights_of_row = by_key.setdefault(row.key, ([], []))
            found.append(row)
            weights_of_row.append(weight)
    return tuple(_merged(rows, weights_of_row) for rows, weights_of_row in by_key.values())


_RULES = {
    "mean": _mean,
    "means": _means,
    "last": _last,
    "peak": _peak,
    "every": _every,
    "nested": _nested,
    "rows": _rows,
}
