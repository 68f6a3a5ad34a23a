"""Finished rows of a study, kept as they finish.

Optuna stores trials; a trial of fifty questions is minutes of work that it does not see.  So every answered
(trial, question) is a line of a small append-only file beside the study, and a search that was killed reads
them back and asks only what is missing.  Each worker writes its own file and all are read: no lock is needed.

A process can die in the middle of a line.  Such a tail has no line end: it is never read, and it is cut off
before its own worker writes again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flatout.atomic_files import append_whole
from flatout.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRow:
    """What a question gave under a trial (None: the unsteered model); None if it gave no number."""

    trial: int | None
    question: str
    value: float | None
    text: str | None = None  # what was generated, where something was


class RowLog:
    """The rows of a study; `folder` holds one file for each worker."""

    def __init__(self, folder: Path, *, worker: str = "0") -> None:
        if not re.fullmatch(r"[\w.-]+", worker):
            raise BadInput(f"a worker named {worker!r}", hint="take letters, digits, '.', '-' and '_'")
        self.folder = folder
        self._path = folder / f"{worker}.jsonl"
        self._rows: dict[tuple[int | None, str], FinishedRow] = {}
        folder.mkdir(parents=True, exist_ok=True)
        _cut_tail(self._path)
        self.reload()

    def reload(self) -> None:
        """Read what all workers have finished."""
        for path in sorted(self.folder.glob("*.jsonl")):
            for row in _read(path):
                self._rows[row.trial, row.question] = row

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, trial: int | None, question: str) -> FinishedRow | None:
        """The row if it has finished."""
        return self._rows.get((trial, question))

    def add(self, rows: Iterable[FinishedRow]) -> None:
        """Keep rows; they are on disk when this returns, as far as a killed process is concerned."""
        lines = []
        for row in rows:
            self._rows[row.trial, row.question] = row
            line = {"trial": row.trial, "question": row.question, "value": row.value}
            lines.append(json.dumps(line if row.text is None else {**line, "text": row.text}) + "\n")
        if lines:
            with open(self._path, "ab", buffering=0) as file:
                append_whole(
                    file, "".join(lines).encode(), when_full="free some space and go on; no row is lost"
                )


def _cut_tail(path: Path) -> None:
    """Drop a line that a dead process has begun."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with open(path, "r+b") as file:
            file.truncate(whole)


def _read(path: Path) -> list[FinishedRow]:
    rows = []
    *lines, _ = path.read_bytes().split(b"\n")  # what follows the last line end is torn, or nothing
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            value = found["value"]
            row = FinishedRow(
                trial=found["trial"],
                question=str(found["question"]),
                value=None if value is None or not math.isfinite(value) else float(value),
                text=found.get("text"),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(
                f"{path}, line {number}: not a finished row", hint="delete the line; its row is asked again"
            ) from error
        rows.append(row)
    return rows
