from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flatout.planner.forecast import fingerprint as room
from flatout.planner.forecast.fingerprint import fingerprint, loaded_modules

OWN = ("fingerprint_of_a_test", "json", "flatout.units")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the tests' own folders, whose files may change while the tests run."""
    monkeypatch.setattr(
        room, "loaded_modules", lambda: [sys.modules[name] for name in OWN if name in sys.modules]
    )


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module that has been imported, and one that will be when the model is made."""
    (tmp_path / "train.py").write_text("x = 1\n")
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "late.py").write_text("y = 1\n")
    (tmp_path / "config.yaml").write_text("batch_size: 4\n")
    module = ModuleType(OWN[0])
    module.__file__ = str(tmp_path / "train.py")
    sys.modules[module.__name__] = module
    yield tmp_path
    del sys.modules[module.__name__]


def of(project: Path, **changes: Any) -> str | None:
    asked: dict[str, Any] = {
        "settings": {"batch_size": 4, "model.width": 8},
        "varied": ["batch_size"],
        "configs": [project / "config.yaml"],
        "options": {"task": None},
    }
    return fingerprint("pkg:build", **{**asked, **changes})


def test_what_a_plan_varies_changes_nothing(project: Path) -> None:
    first = of(project)
    assert first == of(project) is not None
    (project / "config.yaml").write_text("batch_size: 8\n")
    assert of(project, settings={"batch_size": 8, "model.width": 8}) == first
    (project / "readme.md").write_text("nothing of a model")
    (project / ".flatout").mkdir()
    (project / ".flatout" / "manifest.json").write_text("{}")
    assert of(project) == first


@pytest.mark.parametrize("file", ["train.py", "layers/late.py", "width.json"])
def test_a_file_of_the_job_changes_it(file: str, project: Path) -> None:
    first = of(project)
    (project / file).write_text("z = 2\n")
    assert of(project) != first


def test_a_setting_an_option_and_a_package_change_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {of(project), of(project, settings={"batch_size": 4, "model.width": 16})}
    found.add(of(project, options={"task": "masked-lm"}))
    monkeypatch.setattr(room, "_version", lambda package: "0.0")
    found.add(of(project))
    assert len(found) == 4


def test_a_config_folder_counts_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    first = fingerprint(str(tmp_path), settings={})
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert fingerprint(str(tmp_path), settings={}) != first


def test_too_much_to_look_at_has_no_checksum(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_BYTES", 3)
    assert of(project) is None
    monkeypatch.setattr(room, "MOST_ENTRIES", 1)
    assert of(project) is None


def test_a_module_that_only_names_a_file_is_none_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch.ops does: the folder one happens to be in is no part of the job."""
    import torch

    assert not Path(torch.ops.__file__).is_absolute()
    monkeypatch.setattr(room, "loaded_modules", lambda: [torch.ops, torch.classes])
    monkeypatch.chdir(tmp_path)
    assert room._folders("pkg:build") == set()


def test_whatever_is_loaded_is_looked_at() -> None:
    assert {sys.modules[__name__], room} <= set(loaded_modules())


def test_python_packages_and_flatout_are_not_the_users(tmp_path: Path) -> None:
    assert room._folders("pkg:build") == set()
    assert room._folders(str(tmp_path)) == {tmp_path.resolve()}
