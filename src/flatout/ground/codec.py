"""Frozen dataclasses to JSON and back, by their type hints.

Covers what the nouns of this package use: nested dataclasses, tuples, string-keyed dicts, Literals,
optional and plain values.  A value of the wrong shape is named by its path (`steps[3].step_s`), so
that a damaged file gives a sentence and not a stack trace.  Unknown keys are ignored: a file written
by a later minor release stays readable.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union

Shape = TypeVar("Shape")


class WrongShape(ValueError):
    """A decoded value does not have the declared type; the message names its path."""


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, as they are."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def encode(value: Any) -> Any:
    """Return a dataclass as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: encode(item) for name, item in fields_of(value).items()}
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def map_floats(value: Any, change: Callable[[float], Any]) -> Any:
    """Return plain JSON values with every float changed."""
    if isinstance(value, float):
        return change(value)
    if isinstance(value, dict):
        return {key: map_floats(item, change) for key, item in value.items()}
    return [map_floats(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def name_nonfinite(value: Any) -> Any:
    """Return plain JSON values with NaN and infinity, which JSON lacks, by their names."""
    return map_floats(value, lambda number: number if math.isfinite(number) else str(number))


def round_floats(value: Any, *, digits: int = 6) -> Any:
    """Return plain JSON values whose floats have no more digits than were measured."""
    return map_floats(value, lambda number: float(f"{number:.{digits}g}"))


def decode(shape: type[Shape], data: Any, path: str = "") -> Shape:
    """Build `shape` from plain JSON values."""
    return typing.cast(Shape, _decode(shape, data, path or shape.__name__))


@functools.cache
def _hints(shape: type) -> dict[str, Any]:
    return typing.get_type_hints(shape)


def _decode(shape: Any, data: Any, path: str) -> Any:
    origin = typing.get_origin(shape)
    if shape is Any:
        return data
    if origin in (Union, types.UnionType):
        return _decode_union(shape, data, path)
    if origin is Literal:
        if data not in typing.get_args(shape):
            raise WrongShape(f"{path} is {data!r}, expected one of {typing.get_args(shape)}")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise WrongShape(f"{path} is {type(data).__name__}, expected a list")
        (item, *_rest) = typing.get_args(shape)
        return tuple(_decode(item, value, f"{path}[{i}]") for i, value in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise WrongShape(f"{path} is {type(data).__name__}, expected an object")
        item = typing.get_args(shape)[1]
        return {key: _decode(item, value, f"{path}.{key}") for key, value in data.items()}
    if dataclasses.is_dataclass(shape):
        return _decode_dataclass(shape, data, path)
    if shape is float and type(data) is int:
        return float(data)
    if type(data) is not shape:
        raise WrongShape(f"{path} is {type(data).__name__}, expected {shape.__name__}")
    return data


def _decode_union(shape: Any, data: Any, path: str) -> Any:
    options = typing.get_args(shape)
    if data is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    literals = [option for option in options if typing.get_origin(option) is Literal]
    if len(literals) == len(options) > 1:  # one list of names, written as several: an error names them all
        options = (Literal[tuple(name for one in literals for name in typing.get_args(one))],)
    for option in options[:-1]:
        try:
            return _decode(option, data, path)
        except WrongShape:
            continue
    return _decode(options[-1], data, path)


def _decode_dataclass(shape: Any, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise WrongShape(f"{path} is {type(data).__name__}, expected an object")
    hints = _hints(shape)
    values = {}
    for field in dataclasses.fields(shape):
        if field.name in data:
            values[field.name] = _decode(hints[field.name], data[field.name], f"{path}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise WrongShape(f"{path}.{field.name} is missing")
    return shape(**values)
