"""Rows of the coverage page whose commands need a GPU: each runs, and shows what it is said to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_coverage_page import ROOT, Row, rows

pytestmark = pytest.mark.gpu

# What the output of a row must hold, by its number.
SHOWN = {
    "1.10": r"(?m)^ *>?  ?\S.* \d+(\.\d+)? (s|ms|µs)$",  # the measured time of a suggestion's step
    "3.5": r"'steps: compiled': ",
}


def needing_a_gpu() -> list[Row]:
    return [row for row in rows() if row.needs_gpu]


def test_every_row_that_needs_a_gpu_is_known_here() -> None:
    assert {row.number for row in needing_a_gpu()} == SHOWN.keys()


@pytest.mark.parametrize("row", needing_a_gpu(), ids=lambda row: row.number)
def test_its_command_shows_it(row: Row, tmp_path: Path) -> None:
    assert row.command is not None
    command = tmp_path / "flatout"  # where the package is on the path but not installed there is none
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flatout "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", row.command],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(SHOWN[row.number], done.stdout), done.stdout
