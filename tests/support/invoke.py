"""The command in this process, its output and its errors apart with every version of click."""

from __future__ import annotations

import inspect
from typing import Any

from typer.testing import CliRunner, Result

from flatout.cli.app import application


def invoke(*arguments: object) -> Result:
    """Run `flatout` with these arguments."""
    # Before click 8.2 a runner mixed the two unless it was told not to.
    mixes = "mix_stderr" in inspect.signature(CliRunner).parameters
    apart: dict[str, Any] = {"mix_stderr": False} if mixes else {}
    return CliRunner(**apart).invoke(application(), [*map(str, arguments)])
