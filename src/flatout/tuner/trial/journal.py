"""Record trials as they finish, so that an interrupted tuning can continue.

A tuning is a sequence of trials, and each depends only on the results before it.  Given the recorded results
again, it reaches the trial at which it was interrupted.  The journal names its job: for another job, or a
script that has changed, it starts anew.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from flatout.ground.atomic_files import cut_torn_line
from flatout.ground.codec import WrongShape, decode, encode
from flatout.ground.runs import home_folder
from flatout.tuner.trial.meter import TrialResult

FORMAT, VERSION = "flatout-tuning-journal", 2


def journal_path(command: tuple[str, ...]) -> Path:
    """Return the path of a command's journal, in flatout's own folder."""
    stem = Path(command[0]).name.removesuffix(".py") if command else "job"
    return home_folder() / f"{stem}-tuning.jsonl"


class Journal:
    """The trials of one tuning, in a file that grows by a line for each."""

    def __init__(
        self, path: Path, *, job: dict[str, Any], resume: bool = False, evidence: Path | None = None
    ) -> None:
        self.path = path
        self._known: dict[str, deque[tuple[TrialResult, ...]]] = defaultdict(deque)
        lines = _read(path) if resume else []
        if lines and lines[0].get("job") == job:
            for line in lines[1:]:
                self._known[line["key"]].append(line["results"])
        self.num_known = sum(map(len, self._known.values()))
        if self.num_known:
            cut_torn_line(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            where = None if evidence is None else str(evidence)
            head = {"format": FORMAT, "version": VERSION, "job": job, "evidence": where}
            path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def count(self, key: str) -> int:
        """Return how many recorded results of such trials were not used yet."""
        return len(self._known[key])

    def find(self, key: str) -> tuple[TrialResult, ...] | None:
        """Return the next recorded results of such trials."""
        return self._known[key].popleft() if self._known[key] else None

    def add(self, key: str, *results: TrialResult, ahead: bool = False) -> None:
        """Record trials that ran together; with `ahead`, `find` returns them later."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "results": encode(list(results))}) + "\n")
        if ahead:
            self._known[key].append(results)

    def close(self) -> None:
        """Remove the journal: the tuning is done."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder holds other files
            self.path.parent.rmdir()


def evidence_of(path: Path) -> Path | None:
    """Return the evidence that an interrupted tuning began with, or None."""
    lines = _read(path)
    named = lines[0].get("evidence") if lines else None
    return Path(named) if named and Path(named).is_file() else None


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the head and the complete lines after it; an interrupt may have cut off the last."""
    found: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return found
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            if found:
                results = tuple(decode(TrialResult, result) for result in entry["results"])
                entry = {"key": entry["key"], "results": results}
            elif entry.get("format") != FORMAT or entry.get("version") != VERSION:
                return []
        except (ValueError, KeyError, TypeError, WrongShape):
            break
        found.append(entry)
    return found
