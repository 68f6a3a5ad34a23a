"""Finished rows of a study, kept as they finish.

Optuna stores trials; a trial of fifty questions is minutes of work that it does not see.  So every answered
(trial, question) is a line of a small append-only file beside the study, and a search that was killed reads
them back and asks only what is missing.  Each worker writes its own file and all are read: no lock is needed.

A process can die in the middle of a line.  Such a tail has no line end: it is never read, and it is cut off
before its own worker writes again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from flatout.ground.atomic_files import append_whole, cut_torn_line
from flatout.ground.codec import decode, encode
from flatout.ground.errors import BadInput


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
            raise BadInput(
                f"the worker name {worker!r} is not allowed", hint="use letters, digits, '.', '-' and '_'"
            )
        self.folder = folder
        self._path = folder / f"{worker}.jsonl"
        self._rows: dict[tuple[int | None, str], FinishedRow] = {}
        folder.mkdir(parents=True, exist_ok=True)
        cut_torn_line(self._path)
        self.reload()

    def reload(self) -> None:
        """Read what all workers have finished."""
        for path in sorted(self.folder.glob("*.jsonl")):
            for row in _read(path):
                self._rows[row.trial, row.question] = row

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, trial: int | None, question: str) -> FinishedRow | None:
        """Return a row if it has finished."""
        return self._rows.get((trial, question))

    def add(self, row: FinishedRow) -> None:
        """Keep a row; it is on disk when this returns, as far as a killed process is concerned."""
        self._rows[row.trial, row.question] = row
        line = {name: value for name, value in encode(row).items() if name != "text" or value is not None}
        with open(self._path, "ab", buffering=0) as file:
            content = (json.dumps(line) + "\n").encode()
            append_whole(file, content, when_full="free some space and continue; no row is lost")


def _read(path: Path) -> list[FinishedRow]:
    rows = []
    *lines, _ = path.read_bytes().split(b"\n")  # what follows the last line end is torn, or nothing
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(decode(FinishedRow, json.loads(line)))
        except ValueError as error:
            raise BadInput(
                f"{path}, line {number}: not a finished row", hint="delete the line; its row is asked again"
            ) from error
    return rows
