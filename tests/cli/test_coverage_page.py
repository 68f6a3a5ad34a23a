"""The coverage page keeps every feature, and what it calls done can be shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "coverage.md"
FEATURES_PER_TEXT = {0: 12, 1: 14, 2: 12, 3: 11, 4: 11}
STATUSES = {"done", "in part", "planned"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    number: str
    feature: str
    where: str
    command: str | None
    status: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not re.match(r"\| \d+\.\d+ \|", line):
            continue
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        number, feature, where, shown_by, status = cells
        command = re.fullmatch(r"`(.+)`", shown_by)
        assert command or not shown_by, f"{number}: {shown_by!r} is not a command"
        found.append(
            Row(
                number=number,
                feature=feature,
                where=where,
                command=command[1] if command else None,
                status=status.partition(":")[0],
            )
        )
    return found


def test_every_feature_has_its_row() -> None:
    expected = [f"{text}.{i}" for text, count in FEATURES_PER_TEXT.items() for i in range(1, count + 1)]
    assert [row.number for row in rows()] == expected


def test_every_row_says_what_where_and_how_far() -> None:
    for row in rows():
        assert row.feature and row.where, row.number
        assert row.status in STATUSES, row
        assert (row.command is None) == (row.status == "planned"), row


def chains(shown: list[Row]) -> list[list[Row]]:
    """Rows that use the same folder or file under .flatout, in the order of the page; all others alone."""
    found: dict[str, list[Row]] = {}
    for row in shown:
        kept = re.search(r"\.flatout/\w+", row.command or "")
        found.setdefault(kept[0] if kept else row.number, []).append(row)
    return list(found.values())


def run_in_order(chain: list[Row]) -> list[str]:
    """What went wrong."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for row in chain:
        assert row.command is not None
        done = subprocess.run(
            ["bash", "-c", row.command],
            cwd=ROOT,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},  # others run beside it
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0 or not done.stdout.strip():
            return [f"{row.number}: exit {done.returncode}: {row.command}\n{done.stdout}\n{done.stderr}"]
    return []


@pytest.mark.timeout(900)
def test_commands_of_finished_rows_run() -> None:
    shown = [row for row in rows() if row.command is not None]
    assert any(row.status == "done" for row in shown)
    longest_first = sorted(chains(shown), key=len, reverse=True)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        wrong = [each for found in pool.map(run_in_order, longest_first) for each in found]
    assert not wrong, "\n".join(wrong)
