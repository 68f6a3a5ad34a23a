"""The examples learn, in fewer epochs than they run by themselves."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from flatout.engines.evolution.settings import make_settings, read_settings
from flatout.engines.evolution.training.trainer import evolve
from tests.support.warm_python import warm

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "evolution"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pole_stays_up() -> None:
    before, after = example("cart_pole").train(epochs=12)
    assert before < 50
    assert after > 120


def test_the_spirals_are_told_apart() -> None:
    before, after = example("spirals").train(epochs=120)
    assert after > before + 0.15
    assert after > 0.8


def test_the_tiny_model_runs_its_config(tmp_path: Path) -> None:
    done = warm().run("python", FOLDER / "tiny_model.py", tmp_path / "tiny", check=True)
    (num_weights,) = re.findall(r"a model of (\d+) weights", done.stdout)
    given = read_settings(FOLDER / "digit_copy.yaml")
    assert f"{int(num_weights):,} random weights" in (FOLDER / "digit_copy.yaml").read_text()
    assert f"{int(num_weights):,} weights" in (FOLDER / "README.md").read_text()
    assert make_settings(given).epochs == 250
    outcome = evolve({**given, "model": str(tmp_path / "tiny"), "out": str(tmp_path / "run"), "epochs": 2})
    assert outcome.epochs == 2 and outcome.model is not None


def test_every_file_is_in_the_readme() -> None:
    files = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".yaml")}
    assert len(files) == 4
    text = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in text for name in files)
