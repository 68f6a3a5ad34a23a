"""The example of steering does what its files say."""

from __future__ import annotations

import re
from pathlib import Path

from flatout.engines.steering.settings import make_settings, read_settings
from flatout.engines.steering.verbs import steer
from tests.support.warm_python import warm

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "steering"


def test_the_tiny_model_runs_its_config(tmp_path: Path) -> None:
    done = warm().run("python", FOLDER / "tiny_model.py", tmp_path, check=True)
    (weights, questions) = re.findall(r"a model of (\d+) weights and (\d+) questions", done.stdout)[0]
    text = (FOLDER / "README.md").read_text()
    assert f"{int(weights):,} random weights" in (FOLDER / "tiny.yaml").read_text()
    assert f"{int(weights):,} random weights" in text and f"{questions} questions" in text
    given = read_settings(FOLDER / "tiny.yaml")
    assert f"{given['trials']} trials" in text
    moved = {
        "model": str(tmp_path / "model"),
        "questions": str(tmp_path / "questions.jsonl"),
        "out": str(tmp_path / "run"),
        "trials": 16,
    }
    record = steer({**given, **moved}).record
    assert record is not None and record.retest is not None
    assert record.retest.difference.low > 0


def test_the_config_of_a_real_model_lacks_only_what_is_the_users() -> None:
    given = read_settings(FOLDER / "real_model.yaml")
    assert not {"model", "questions", "out"} & set(given)
    settings = make_settings({**given, "model": "m", "questions": "q"})
    assert settings.position == "last" and settings.trials == 100


def test_every_file_is_in_the_readme() -> None:
    files = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".yaml")}
    assert len(files) == 4
    text = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in text for name in files)
