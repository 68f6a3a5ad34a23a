"""The page on a task of one's own is at most a screen, and its files and commands run as they stand."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatout.cli.app import application
from tests.support.evolution import save_tiny_texts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "your_task.md"
BLOCK = re.compile(r'^```\w+ title="(\S+)"\n(.*?)^```$', re.M | re.S)
SCREEN = 60  # lines
BRIEF = ("--epochs", "1", "--population", "4", "--prompts", "2", "--set", "evaluate_prompts=8")


def test_the_page_is_one_screen() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= SCREEN


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    assert set(files) == {"make_sums.py", "my_rewards.py", "sums.yaml", "train.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    save_tiny_texts(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # another test has one of this name
    runpy.run_path("make_sums.py")
    answer = CliRunner().invoke(application(), ["evolve", "sums.yaml", "--out", "runs/sums", *BRIEF])
    assert answer.exit_code == 0, answer.stderr
    assert "rewards failed" not in answer.stderr and "trained" in answer.stdout
    short = files["train.py"].replace('"epochs": 100', '"epochs": 1, "population": 4, "prompts": 2')
    (tmp_path / "train.py").write_text(short)
    runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    assert re.fullmatch(r"\d\.\d+ untrained, \d\.\d+ trained\n", capsys.readouterr().out)
