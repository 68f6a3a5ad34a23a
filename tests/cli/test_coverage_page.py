"""The coverage page keeps every feature, and what it calls done can be shown."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.warm_python import warm

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "coverage.md"
FEATURES_PER_TEXT = {0: 12, 1: 14, 2: 12, 3: 11, 4: 11}
STATUSES = {"done", "in part", "planned"}
# A command fails where its figure is wrong: it asserts one, or compares two files.
CHECKS = ("assert ", "cmp $(")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    number: str
    feature: str
    where: str
    command: str | None
    status: str
    needs_gpu: bool  # tests/gpu runs it


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
                needs_gpu="needs a GPU" in status,
            )
        )
    return found


def test_every_feature_has_its_row() -> None:
    expected = [f"{text}.{i}" for text, count in FEATURES_PER_TEXT.items() for i in range(1, count + 1)]
    assert [row.number for row in rows()] == expected


def test_every_row_says_what_where_and_how_far() -> None:
    assert any(row.status == "done" for row in rows())
    for row in rows():
        assert row.feature and row.where, row.number
        assert row.status in STATUSES, row
        assert (row.command is None) == (row.status == "planned"), row


def test_the_commands_check_a_figure() -> None:
    unchecked = [
        row.number for row in rows() if row.command and not any(check in row.command for check in CHECKS)
    ]
    assert not unchecked


@pytest.mark.parametrize(
    "row", [row for row in rows() if row.command and not row.needs_gpu], ids=lambda row: row.number
)
def test_the_command_of_a_finished_row_runs(row: Row) -> None:
    """In the order of the page: a row may use what an earlier one left under .flatout."""
    assert row.command is not None
    done = subprocess.run(
        ["bash", "-c", row.command],
        cwd=ROOT,
        env=warm().environment(OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.strip(), f"{row.command}\n{done.stdout}\n{done.stderr}"
