"""The page on steering is executed, and names only what exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatout.cli.app import application
from flatout.engines.steering.report.record import load_record
from flatout.engines.steering.settings import METHODS, SearchSettings
from flatout.engines.steering.trials.steering import WHERE
from tests.support.steering import write_tiny
from tests.support.warm_python import warm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "steering.md"
BLOCK = re.compile(r"^(<!-- not run: .*? -->\n)?```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(language: str, page: Path = PAGE) -> list[tuple[str, str]]:
    """(reason not to run it, text) of each block."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(reason, text) for reason, name, text in found if name == language]


def test_the_snippets_run(tmp_path: Path) -> None:
    found = blocks("python")
    assert [bool(reason) for reason, _ in found] == [False, True]
    script = tmp_path / "page.py"
    script.write_text(found[0][1], encoding="utf-8")
    done = warm().run("python", "-W", "error", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_page_on_judges_fits_a_screen_and_its_judge_finds_a_vector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.with_name("your_judge.md")
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 45
    ((_, judge),) = blocks("python", page)
    ((_, commands),) = blocks("bash", page)
    made, searched = commands.replace("\\\n", " ").strip().split("\n")
    assert made == "python examples/steering/tiny_model.py tiny"
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path / "tiny")
    (tmp_path / "my_judges.py").write_text(judge, encoding="utf-8")
    done = CliRunner().invoke(application(), [*searched.split()[1:], "--device", "cpu", "--json"])
    assert done.exit_code == 0, done.output
    record = load_record(tmp_path / "tiny" / "run")
    assert record.score_name == "score of my_judges:says_yes"
    assert record.winner is not None and record.baseline_score is not None
    assert record.winner.score is not None and record.winner.score > record.baseline_score + 0.2


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
    assert name in (*METHODS, *WHERE, *(each.name for each in fields(SearchSettings)))
