"""What a verb says: one JSON document that every reader can parse, and plain text."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import pytest
from rich.console import Console
from rich.text import Text

from flatout.cli.output import (
    bullet,
    facts_table,
    plain_table,
    print_document,
    print_json,
    render_lines,
    say_written,
)


@dataclass(frozen=True)
class Answer:
    figure: float


def test_a_document_is_versioned_and_has_no_number_that_json_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_document("flatout-test", Answer(float("nan")), parts=(Answer(1.5), {"deep": [float("inf")]}))
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "format": "flatout-test",
        "version": 1,
        "figure": None,
        "parts": [{"figure": 1.5}, {"deep": [None]}],
    }
    print_json({"path": 3 + 0j}, default=str)
    assert json.loads(capsys.readouterr().out) == {"path": "(3+0j)"}


def test_what_was_written_is_said_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say_written("a.html", None, "b.png")
    assert capsys.readouterr().err == "flatout: wrote a.html\nflatout: wrote b.png\n"


def test_facts_have_no_head_and_no_terminal_codes() -> None:
    console = Console(file=io.StringIO(), width=40)
    text = render_lines(console, [facts_table([("GPU", "x\x1b[31m"), ("a long name", "1")])])
    assert text == "GPU          x\ufffd[31m\na long name  1\n"


def test_lines_end_without_spaces_and_a_diff_is_never_wrapped() -> None:
    table = plain_table("name", "size", right=("size",))
    table.add_row("a", "1")
    long = Text("+" + "x" * 60, no_wrap=True, overflow="ignore")
    console = Console(width=40, highlight=False, markup=False)
    lines = render_lines(console, [table, "", bullet("one two " * 8, indent=2), long]).splitlines()
    assert lines[:3] == ["name  size", "a        1", ""]
    assert lines[3].startswith("  - one two") and lines[4].startswith("    ") and lines[-1] == "+" + "x" * 60
    assert all(line == line.rstrip() for line in lines)
