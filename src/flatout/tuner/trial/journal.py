"""Finished trials, recorded as they finish, so that an interrupted tuning can continue.

A tuning is a sequence of trials, and what follows depends on their results alone.  Told the results again, it
comes to the trial at which it was interrupted.  The journal names the job it is of: for another job, or for
a script that has changed, it begins anew.
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
    """Where the journal of a command lies: in flatout's own folder."""
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
        """How many results of such trials were written down and not asked for yet."""
        return len(self._known[key])

    def find(self, key: str) -> tuple[TrialResult, ...] | None:
        """The next results of trials like these that were written down."""
        return self._known[key].popleft() if self._known[key] else None

    def add(self, key: str, *results: TrialResult, ahead: bool = False) -> None:
        """Write down trials that ran together; `ahead` of being asked for, they can be found."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "results": encode(list(results))}) + "\n")
        if ahead:
            self._known[key].append(results)

    def close(self) -> None:
        """The tuning is done: nothing is left to resume."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other things are in it
            self.path.parent.rmdir()


def evidence_of(path: Path) -> Path | None:
    """The evidence that an interrupted tuning began with; None where there is none."""
    lines = _read(path)
    named = lines[0].get("evidence") if lines else None
    return Path(named) if named and Path(named).is_file() else None


def _read(path: Path) -> list[dict[str, Any]]:
    """The head and the whole lines after it; an interrupt may have cut off the last."""
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
