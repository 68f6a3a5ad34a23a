"""The README is executed: its commands from top to bottom as a reader would, its Python as it stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.measure import BRIEF, flatout, with_schedule
from tests.support.warm_python import warm

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BLOCK = re.compile(
    r"^(?:<!-- not run:(?P<reason>.*?)-->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    language: str
    text: str
    reason_not_run: str | None

    @property
    def commands(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip() and not line.startswith("#")]


def blocks(language: str) -> list[Block]:
    found = [
        Block(language=match["language"], text=match["text"], reason_not_run=match["reason"])
        for match in BLOCK.finditer(README.read_text(encoding="utf-8"))
    ]
    return [block for block in found if block.language == language]


def commands_to_run() -> list[str]:
    return [command for block in blocks("bash") if block.reason_not_run is None for command in block.commands]


def test_every_block_is_seen_and_a_skipped_one_says_why() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(BLOCK.findall(text)) == len(re.findall(r"^```\w+$", text, flags=re.MULTILINE))
    assert len(re.findall(r"<!-- not run", text)) == sum(
        block.reason_not_run is not None for language in ("bash", "python") for block in blocks(language)
    )
    for block in blocks("bash") + blocks("python"):
        assert block.reason_not_run is None or len(block.reason_not_run.split()) >= 3


def test_the_first_command_is_the_demo() -> None:
    assert commands_to_run()[0] == "make demo"
    assert len(commands_to_run()) >= 5


@pytest.mark.timeout(600)
def test_commands_run_from_top_to_bottom() -> None:
    if not (ROOT / ".venv" / ".installed").exists():
        pytest.skip("make has not set up .venv here, and a test must not install packages")
    # one round of the demo, and not its second half, which takes minutes: test_tune.py has seconds
    one_round = {**BRIEF, "FEWEST_ROUNDS": 1, "MOST_ROUNDS": 1}
    demo = {"DIAGNOSE": shlex.join([*flatout(one_round), "--seconds", "300"]), "TUNE": ""}
    for command in commands_to_run():
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env={**os.environ, **demo},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        # A diagnosis with findings ends with 1; everything else the README shows ends well.
        assert done.returncode == (1 if " diagnose " in command else 0), (command, done.stdout, done.stderr)
        assert done.stdout.strip(), command


@pytest.mark.parametrize("block", [block for block in blocks("python") if block.reason_not_run is None])
def test_python_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block.text, encoding="utf-8")
    briefly = f"{with_schedule(BRIEF)}import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = warm().run("python", "-c", briefly, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_table_of_verbs_lists_every_command() -> None:
    from flatout.cli.app import application

    listed = set(re.findall(r"^\| `flatout (\w+)` \|", README.read_text(), flags=re.MULTILINE))
    commands = {
        command.name or command.callback.__name__
        for command in application().registered_commands
        if command.callback is not None
    }
    groups = {group.name for group in application().registered_groups}
    assert listed == commands | groups
