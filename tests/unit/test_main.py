"""`python -m flatout` is the command."""

from __future__ import annotations

import subprocess
import sys

import flatout


def test_the_module_runs_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flatout", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"flatout {flatout.__version__}\n"
