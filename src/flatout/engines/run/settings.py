"""The settings of a run: a table of keys from a YAML file, from flags, or from the folder of a run.

An engine declares its settings as a frozen dataclass, whose tables may be nested; the rest is here.  An
unknown key is refused with the name of the nearest field.  A run writes its settings into its folder, so a
run folder works wherever a settings file does.  A run that resumes may change only settings that do not
change its result.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from flatout.engines.run.log import read_header
from flatout.ground.codec import WrongShape, decode, encode, fields_of
from flatout.ground.documents import write_json
from flatout.ground.errors import BadInput, near_hint

FILE = "settings.json"
Settings = TypeVar("Settings")


def read_settings(path: Path, shape: type, *, verb: str) -> dict[str, Any]:
    """Read the keys of a YAML file, or the settings of the run in a folder, which continues there."""
    if not path.is_dir():
        found = _read_yaml(path)
        check_keys(found, shape, verb=verb, source=str(path))
        return found
    kept = path / FILE
    found = _read_yaml(kept) if kept.is_file() else read_header(path).get("settings", {})  # JSON is YAML
    known = {each.name for each in fields(shape)}
    if not isinstance(found, dict) or not found or not known >= found.keys():
        raise BadInput(
            f"{path} holds no run of {verb}", hint="name a settings file, or the folder of such a run"
        )
    return {**found, "out": str(path)}


def given_settings(
    settings: Mapping[str, Any] | Path,
    changes: Mapping[str, Any] | None,
    *,
    read: Callable[[Path], dict[str, Any]],
) -> dict[str, Any]:
    """Collect the settings that the user gave, and no defaults.

    `settings` are keys and values, a YAML file, or the folder of a run; `changes` override them, and a key of
    `changes` may reach into a table ("phase1.steps").
    """
    given = dict(settings) if isinstance(settings, Mapping) else read(settings)
    for key, value in (changes or {}).items():
        given = with_setting(given, key, value)
    return given


def save_settings(folder: Path, settings: Any) -> Path:
    """Write the settings into the folder of their run."""
    path = folder / FILE
    write_json(path, settings)
    return path


def make_settings(
    shape: type[Settings], given: Mapping[str, Any], *, verb: str, needed: Sequence[str] = ()
) -> Settings:
    """Make settings from the given keys; a missing key has its default."""
    check_keys(given, shape, verb=verb, source="the settings")
    for name in needed:
        if not given.get(name):
            raise BadInput(f"no {name} is given", hint=f"give --{name}, or {name}: in the settings file")
    try:
        return decode(shape, encode(dict(given)), path="settings")
    except WrongShape as error:
        raise BadInput(str(error), hint=f"flatout {verb} --help says what each setting is") from error


def check_resume(saved: Mapping[str, Any], settings: Any, *, free: Collection[str]) -> None:
    """Raise BadInput if a setting differs from the saved one and is not `free` to change."""
    given = encode(settings)
    for key, after in given.items():
        if key in free or key not in saved:
            continue
        if found := _first_difference(saved[key], after, key):
            name, before, now = found
            raise BadInput(
                f"the run has {name}={before!r}, but {now!r} is given",
                hint="omit it to resume, or start a run in another --out",
            )


def with_setting(given: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return `given` with one more setting; `key` may reach into a nested table: phase1.steps."""
    first, dot, rest = key.partition(".")
    if not dot:
        return {**given, first: value}
    inner = given.get(first) or {}
    if not isinstance(inner, Mapping):
        raise BadInput(f"{first!r} is not a table, so {key!r} cannot be set", hint=f"set {first} itself")
    return {**given, first: with_setting(inner, rest, value)}


def check_keys(given: Any, shape: type, *, verb: str, source: str, place: str = "") -> None:
    """Raise BadInput for the first key, in any table, that is not a field; decoding checks types."""
    if not isinstance(given, Mapping):
        return
    names = [each.name for each in fields(shape)]
    check_names(given, names=names, verb=f"{verb}'s {place}" if place else verb, source=source)
    hints = typing.get_type_hints(shape)
    for name, value in given.items():
        here = f"{place}.{name}" if place else name
        if dataclasses.is_dataclass(hints[name]):
            check_keys(value, hints[name], verb=verb, source=source, place=here)
        elif (item := _item_of(hints[name])) is not None and isinstance(value, Mapping):
            for key, table in value.items():
                check_keys(table, item, verb=verb, source=source, place=f"{here}.{key}")


def check_names(given: Mapping[str, Any], *, names: Sequence[str], verb: str, source: str) -> None:
    """Raise BadInput for the first key that is not one of `names`."""
    for key in given:
        if key not in names:
            raise BadInput(
                f"{source} sets {key!r}, which is not a setting of {verb}", hint=near_hint(str(key), names)
            )


def out_of_range(
    settings: Any,
    *,
    at_least: Mapping[str, float] | None = None,
    above_zero: Collection[str] = (),
    shares: Collection[str] = (),
    skip: Collection[str] = (),
) -> list[str]:
    """List each number, in any table, that is outside the range of its name or not finite; None passes."""
    wrong = []
    for place, value in _numbers(settings, skip=skip):
        name = place.rpartition(".")[2]
        if value < (at_least or {}).get(name, value):
            wrong.append(f"{place}={value} is below {(at_least or {})[name]}")
        if name in above_zero and not value > 0:
            wrong.append(f"{place}={value} is not above 0")
        elif name in shares and not 0 <= value <= 1:
            wrong.append(f"{place}={value} is not between 0 and 1")
        elif not -math.inf < value < math.inf:
            wrong.append(f"{place}={value} is not finite")
    return wrong


def _read_yaml(path: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"no settings file at {path}", hint="check the path") from None
    except (OSError, UnicodeDecodeError, YAMLError, RecursionError) as error:
        raise BadInput(
            f"{path} cannot be read: {' '.join(str(error).split())}", hint="a settings file is a YAML table"
        ) from error
    if not isinstance(found or {}, dict):
        raise BadInput(f"{path} holds a {type(found).__name__}", hint="write a table of keys and values")
    return found or {}


def _item_of(hint: Any) -> type | None:
    """Return the dataclass that a dict of tables holds."""
    found = typing.get_args(hint)[1:] if typing.get_origin(hint) is dict else ()
    return found[0] if found and dataclasses.is_dataclass(found[0]) else None  # type: ignore[return-value]


def _first_difference(before: Any, after: Any, place: str) -> tuple[str, Any, Any] | None:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if found := _first_difference(before.get(key), after.get(key), f"{place}.{key}"):
                return found
        return None
    return None if before == after else (place, before, after)


def _numbers(value: Any, place: str = "", *, skip: Collection[str]) -> Iterator[tuple[str, float]]:
    """Yield every number with its place: `tasks.qa.rank`."""
    if dataclasses.is_dataclass(value):
        value = fields_of(value)
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in skip:
                yield from _numbers(item, f"{place}.{name}" if place else name, skip=skip)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield place, value
