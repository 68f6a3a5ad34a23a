"""The page on what executes code names every door of the source, and a new door must be named there."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

from flatout.engines.adapters.settings import AdaptSettings
from flatout.engines.evolution.settings import EvolveSettings
from flatout.engines.steering.settings import SearchSettings

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "flatout"
PAGE = (ROOT / "docs" / "safety.md").read_text(encoding="utf-8")
# What turns a name or a file into running code, and the modules that do so, each with its row on the page.
DOORS = {
    *("import_user_module", "import_named", "import_file", "spec_from_file_location"),
    *("load_plugins", "entry_points"),
    *("exec", "eval", "run_path", "run_module"),
}
BEHIND = {
    "doctor/rule.py": "flatout.rules",
    "hardware/matching.py": "flatout.datasheets",
    "ground/user_code.py": "entry points",
    "multiplex/models/families.py": "flatout.model_families",
    "engines/evolution/tasks/find_task.py": "flatout.evolution_tasks",
    "engines/evolution/rewards/make_reward.py": "rewards of `evolve`",
    "engines/adapters/tasks/known.py": "tasks_folder",
    "engines/steering/trials/scoring.py": "judges of `steer search`",
    "memory/jobs/from_name.py": "build function",
    "ground/script/main.py": "your script or module",
    "monitor/job/run_script.py": "your script or module",  # it raises an interrupt inside the user's frame
}


def doors() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                plain = isinstance(node.func, ast.Name) or name not in ("exec", "eval")
                if name in DOORS and plain:
                    found.setdefault(str(path.relative_to(SOURCE)), set()).add(name)
    return found


def test_every_door_is_on_the_page() -> None:
    assert set(doors()) == set(BEHIND), "a module executes code that the page does not name"
    for module, words in BEHIND.items():
        assert words in PAGE, module


def test_every_group_of_entry_points_is_on_the_page() -> None:
    said = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    groups = set(re.findall(r'^(?:GROUP|PLUGINS) = "(flatout\.\w+)"', said, flags=re.MULTILINE))
    assert len(groups) == 5
    assert all(f"`{group}`" in PAGE for group in groups)


def test_keys_that_are_named_are_settings() -> None:
    for key, settings in (
        ("task", EvolveSettings),
        ("judge", SearchSettings),
        ("tasks_folder", AdaptSettings),
        ("reward_workers", EvolveSettings),
    ):
        assert key in {field.name for field in fields(settings)} and f"`{key}" in PAGE
