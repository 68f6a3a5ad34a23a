"""Files with one JSON object per line.

Every line is read and checked before anything runs: a run must not find the bad line in its third hour.  A
bad one is named by file and line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flatout.ground.errors import BadInput

Kept = TypeVar("Kept")
HINT = "give one JSON object per line"


def read_rows(path: Path, *, read: Callable[[Mapping[str, Any]], Kept], hint: str = HINT) -> list[Kept]:
    """What `read` makes of every line that is not empty; `hint` says what a line looks like."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist", hint="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}", hint="give a UTF-8 text file") from error
    kept = [
        _read_line(line, read=read, place=f"{path}:{number}", hint=hint)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not kept:
        raise BadInput(f"{path} is empty", hint=hint)
    return kept


def _read_line(line: str, *, read: Callable[[Mapping[str, Any]], Kept], place: str, hint: str) -> Kept:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"{place} is not JSON: {error}", hint=hint) from error
    if not isinstance(row, dict):
        raise BadInput(f"{place} is a {type(row).__name__}, not an object", hint=hint)
    try:
        return read(row)
    except BadInput as error:
        raise BadInput(f"{place}: {error.message}", hint=error.hint or hint) from error
