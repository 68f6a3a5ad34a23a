"""Rows from files with one JSON object per line, and their splits.

Every line is read and checked before anything is trained, and a bad one is named by file and line.  Which
split a row belongs to depends on its input alone, by a hash: it is the same on every machine, and the same
input asked twice never lands on both sides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flatout.errors import BadInput

Row = Mapping[str, Any]
Kept = TypeVar("Kept")
SPLITS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
VALIDATION_SHARE, TEST_SHARE = 0.1, 0.1


def read_rows(path: Path, *, read: Callable[[Row], Kept]) -> list[Kept]:
    """What `read` makes of every line that is not empty."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist", hint="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}", hint="give a UTF-8 text file") from error
    kept = [
        _read_line(line, read=read, place=f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not kept:
        raise BadInput(f"{path} is empty", hint="give one JSON object per line")
    return kept


def _read_line(line: str, *, read: Callable[[Row], Kept], place: str) -> Kept:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"{place} is no JSON: {error}", hint="give one JSON object per line") from error
    if not isinstance(row, dict):
        raise BadInput(f"{place} is a {type(row).__name__}", hint="give one JSON object per line")
    try:
        return read(row)
    except BadInput as error:
        raise BadInput(f"{place}: {error.message}", hint=error.hint) from error


def text_field(row: Row, *names: str) -> str:
    """The first of the named fields that a row has; a list of texts is joined."""
    for name in names:
        value = row.get(name)
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            value = " ".join(value)
        if isinstance(value, str) and value.strip():
            return value
    given = next((name for name in names if name in row), None)
    what = f"is {row[given]!r}, not a text" if given else "is missing"
    raise BadInput(f"{given or names[0]!r} {what}", hint=f"a line has: {' or '.join(names)}")


def split_files(folder: Path) -> dict[str, Path]:
    """The JSONL file of each split that a folder has."""
    found = {}
    for split, names in SPLITS.items():
        paths = [folder / f"{name}.jsonl" for name in names]
        if present := [path for path in paths if path.is_file()]:
            found[split] = present[0]
    if "train" not in found:
        raise BadInput(f"{folder} holds no train.jsonl", hint="name the file to train on train.jsonl")
    return found


def share_of(key: str) -> float:
    """A number from 0 to 1 that depends on the words of `key` only."""
    digest = hashlib.blake2b(" ".join(key.split()).lower().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def split_of(key: str) -> str:
    share = share_of(key)
    if share < TEST_SHARE:
        return "test"
    return "validation" if share < TEST_SHARE + VALIDATION_SHARE else "train"


def distinct(records: Sequence[Kept], *, key: Callable[[Kept], str], taken: set[str]) -> list[Kept]:
    """Records whose key is not yet taken, the first of each; their keys are taken then."""
    kept = []
    for record in records:
        name = " ".join(key(record).split()).lower()
        if name not in taken:
            taken.add(name)
            kept.append(record)
    return kept


def some(records: list[Kept], count: int | None, *, key: Callable[[Kept], str]) -> list[Kept]:
    """`count` of the records, chosen by their hash and in their order; all of them for None."""
    if count is None or count >= len(records):
        return records
    by_hash = sorted(range(len(records)), key=lambda place: share_of(f"some {key(records[place])}"))
    return [records[place] for place in sorted(by_hash[:count])]
