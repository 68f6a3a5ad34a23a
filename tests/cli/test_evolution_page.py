"""The page on evolution is executed, from top to bottom in one process, as a reader would."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from flatout.engines.evolution.settings import EvolveSettings
from flatout.engines.evolution.tasks.find_task import OWN
from tests.support.warm_python import warm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evolution.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def test_the_snippets_run(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 3
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    done = warm().run("python", "-W", "error", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert " backwards is \nright: " in done.stdout


@pytest.mark.parametrize("name", [task.name for task in OWN])
def test_every_task_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")


def test_settings_that_are_named_exist() -> None:
    named = {
        "lr_schedule",
        "sigma_end",
        "schedule_epochs",
        "samples",
        "mode",
        "targets",
        "noise",
        "shaping",
        "arithmetic",
        "rows",
        "chunk_members",
        "plain_every",
        "dtype",
    }
    text = PAGE.read_text(encoding="utf-8")
    assert named <= {field.name for field in fields(EvolveSettings)}
    assert all(f"`{name}" in text or f"{name}=" in text for name in named)
