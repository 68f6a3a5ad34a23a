"""JSON files that say what they are: {"format": "flatout-study", "version": 1, ...}; plain JSON; diffs.

A reader checks the format before it believes a field, reads every version up to its own, and answers with one
sentence where it cannot.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flatout.ground.atomic_files import write_whole
from flatout.ground.codec import WrongShape, decode, encode
from flatout.ground.errors import BadInput

Shape = TypeVar("Shape")


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentKind:
    """One kind of document: its format, its version and its words."""

    format: str
    version: int
    what: str  # its name to people: "a study"
    hint: str  # how to get one


def write_json(path: Path, value: Any) -> None:
    """Write a dataclass or plain values as JSON, whole or not at all."""
    write_whole(path, (json.dumps(encode(value), indent=2) + "\n").encode())


def write_document(path: Path, value: Any, kind: DocumentKind) -> None:
    """Write a dataclass, or a table of plain values, whole or not at all."""
    document = {"format": kind.format, "version": kind.version, **encode(value)}
    write_whole(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def read_document(path: Path, shape: type[Shape], kind: DocumentKind) -> Shape:
    """Read what `write_document` wrote."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist; {kind.what} is needed", hint=kind.hint) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}", hint=kind.hint) from None
    return decode_document(document, shape, kind, name=str(path))


def decode_document(document: Any, shape: type[Shape], kind: DocumentKind, *, name: str) -> Shape:
    """Decode plain values with a format and a version into a dataclass; `name` says where they come from."""
    if not isinstance(document, dict) or document.get("format") != kind.format:
        raise BadInput(f"{name} is not {kind.what}", hint=kind.hint)
    found = document.get("version")
    if not isinstance(found, int) or found > kind.version:
        raise BadInput(
            f"{name} has version {found}; this flatout reads up to {kind.version}",
            hint="install the release that wrote it",
        )
    try:
        return decode(shape, document)
    except WrongShape as error:
        raise BadInput(f"{name} is damaged: {error}", hint=kind.hint) from None


def show_diff(texts: Mapping[str, tuple[str, str]]) -> str:
    """Show a unified diff of files before and after; mark a missing newline at the end as git does."""
    lines: list[str] = []
    for file, (before, after) in texts.items():
        lines += difflib.unified_diff(_lines(before), _lines(after), f"a/{file}", f"b/{file}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(text: str) -> list[str]:
    """Split lines as an editor does: str.splitlines would also cut at form feeds inside a comment."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
