"""Files of JSON objects: one per line, or all in one list.

Every row is read and checked before anything runs: a run must not find the bad one in its third hour.  A
bad row is named by file and line, or by its number in the list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flatout.ground.errors import BadInput

Kept = TypeVar("Kept")
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can hold one alone, UTF-8 and tokenizers cannot
HINT = "give one JSON object per line"


def read_rows(path: Path, *, read: Callable[[Mapping[str, Any]], Kept], hint: str = HINT) -> list[Kept]:
    """Return what `read` makes of every row; `hint` says what a row looks like."""
    kept = []
    for place, row in _rows(_read_text(path), path, hint=hint):
        if not isinstance(row, dict):
            raise BadInput(f"{place} is a {type(row).__name__}, not an object", hint=hint)
        if half := _SURROGATE.search(json.dumps(row, ensure_ascii=False)):
            raise BadInput(f"{place} has half of a character: \\u{ord(half[0]):x}", hint="write both halves")
        try:
            kept.append(read(row))
        except BadInput as error:
            raise BadInput(f"{place}: {error.message}", hint=error.hint or hint) from error
    if not kept:
        raise BadInput(f"{path} is empty", hint=hint)
    return kept


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist", hint="check the path") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error}", hint="give a UTF-8 text file") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise BadInput(
            f"{path} cannot be read: line {line}, byte {error.start} is not UTF-8",
            hint="give a UTF-8 text file",
        ) from error


def _rows(text: str, path: Path, *, hint: str) -> Iterator[tuple[str, Any]]:
    """Yield (where it stands, value) of every row."""
    number = 1
    try:
        if text.lstrip().startswith("["):
            for number, row in enumerate(json.loads(text), start=1):
                yield f"{path}, item {number}", row
            return
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"{path}:{number}", json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        within = getattr(error, "lineno", 1) - 1  # of a list: the text is the whole file
        raise BadInput(f"{path}:{number + within} is not JSON: {error}", hint=hint) from error
