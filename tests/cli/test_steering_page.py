"""The page on steering is executed, and names only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flatout
from flatout.cli.app import application
from flatout.engines.steering.settings import METHODS, NAMES
from flatout.engines.steering.trials.steering import WHERE
from tests.support.steering import tiny_search, write_tiny
from tests.support.warm_python import warm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "steering.md"
BLOCK = re.compile(r"^(<!-- not run: .*? -->\n)?```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(language: str) -> list[tuple[str, str]]:
    """(reason not to run it, text) of each block."""
    return [(reason, text) for reason, name, text in BLOCK.findall(PAGE.read_text()) if name == language]


def test_the_snippets_run(tmp_path: Path) -> None:
    found = blocks("python")
    assert [bool(reason) for reason, _ in found] == [False, False, True]
    script = tmp_path / "page.py"
    script.write_text(found[1][1], encoding="utf-8")
    done = warm().run("python", "-W", "error", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_judge_of_the_page_judges_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_judges.py").write_text(blocks("python")[0][1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    given = tiny_search(write_tiny(tmp_path / "tiny"), tmp_path / "run")
    given |= {"judge": "my_judges:is_polite", "max_new_tokens": 2, "trials": 2}
    record = flatout.steer(given).record
    assert record is not None and record.score_name == "score of my_judges:is_polite"
    assert {trial.score for trial in record.trials} == {0.0}  # the tiny model knows no polite word


def test_flags_of_the_commands_exist() -> None:
    commands = [
        line
        for _, text in blocks("bash")
        for line in text.replace("\\\n", " ").splitlines()
        if line.startswith("flatout steer")
    ]
    assert len(commands) == 11
    for command in commands:
        verb = command.split()[2]
        helped = CliRunner().invoke(application(), ["steer", verb, "--help"]).stdout
        for flag in re.findall(r"--[a-z-]+", command):
            assert f"{flag} " in helped, command


@pytest.mark.parametrize("name", [*METHODS, *WHERE, "rungs", "shares"])
def test_methods_places_and_settings_are_named(name: str) -> None:
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")
    assert name in (*METHODS, *WHERE, *NAMES)
