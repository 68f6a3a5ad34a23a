"""Files of rows: JSON objects, one per line or all in one list; or a table, `.csv` or `.tsv`.

The first line of a table names its columns, and its cells are texts.  Every row is read and checked before
anything runs: a run must not find the bad one in its third hour.  A bad row is named by file and line, or
by its number in the list.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flatout.ground.errors import BadInput

Kept = TypeVar("Kept")
TABLES = {".csv": ",", ".tsv": "\t"}  # what separates the cells
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can hold one alone, UTF-8 and tokenizers cannot
HINT = "give one JSON object per line"


def read_rows(path: Path, *, read: Callable[[Mapping[str, Any]], Kept], hint: str = HINT) -> list[Kept]:
    """Return what `read` makes of every row; `hint` says what a row looks like."""
    kept = []
    for place, row in _rows(path, hint=hint):
        if not isinstance(row, dict):
            raise BadInput(f"{place} is a {type(row).__name__}, not an object", hint=hint)
        if half := _SURROGATE.search(json.dumps(row, ensure_ascii=False)):
            raise BadInput(
                f"{place} has an unpaired surrogate: \\u{ord(half[0]):x}",
                hint="write both halves of the pair",
            )
        try:
            kept.append(read(row))
        except BadInput as error:
            raise BadInput(f"{place}: {error.message}", hint=error.hint or hint) from error
    if not kept:
        raise BadInput(f"{path} is empty", hint=hint)
    return kept


def first_row(path: Path, *, hint: str = HINT) -> tuple[str, Any]:
    """Return where the first row stands, and what it is."""
    for place, row in _rows(path, hint=hint):
        return place, row
    raise BadInput(f"{path} is empty", hint=hint)


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


def _rows(path: Path, *, hint: str) -> Iterator[tuple[str, Any]]:
    """Yield (where it stands, value) of every row."""
    text, delimiter = _read_text(path), TABLES.get(path.suffix.lower())
    if delimiter is None:
        yield from _objects(text, path, hint=hint)
    else:
        yield from _cells(text, path, delimiter=delimiter)


def _cells(text: str, path: Path, *, delimiter: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of a table by the names in its first line; a cell may hold line ends."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    number = 1
    try:
        for cells in reader:
            if any(cells) and not names:
                names = _column_names(cells, f"{path}:{number}")
            elif any(cells) and len(cells) != len(names):
                raise BadInput(
                    f"{path}:{number} has {len(cells)} cells, and the table {len(names)} columns",
                    hint=f"the columns are {', '.join(names)}; put a text that holds {delimiter!r} in quotes",
                )
            elif any(cells):
                yield f"{path}:{number}", dict(zip(names, cells, strict=True))
            number = reader.line_num + 1
    except csv.Error as error:
        raise BadInput(
            f"{path}:{number} is not a row of a table: {error}", hint="check its quotes"
        ) from error


def _column_names(cells: list[str], place: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if "" in names or len(set(names)) < len(names):
        raise BadInput(
            f"{place} names the columns {', '.join(map(repr, names))}", hint="give each a name of its own"
        )
    return names


def _objects(text: str, path: Path, *, hint: str) -> Iterator[tuple[str, Any]]:
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
