from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from flatout.memory.cuda.formulas import Formula
from flatout.memory.jobs.job import Recipe
from flatout.memory.trace.record import Guess, Storage, Trace
from flatout.planner.forecast import trace_cache
from flatout.planner.forecast import trace_cache as room
from flatout.planner.forecast.trace_cache import TraceCache, fingerprint, loaded_modules


def trace() -> Trace:
    return Trace(
        sizes={"batch_size": 8, "length": 64},
        storages=(
            Storage(num_bytes=512, component="parameters", phase="setup", op="parameter"),
            Storage(num_bytes=2**40, component="activations", phase="forward", op="aten.mm", module="a.b"),
            Storage(
                num_bytes=512,
                component="workspaces",
                phase="backward",
                op="aten.sum",
                formula=Formula(name="partial_sums", counts=(4, 5, 6)),
            ),
        ),
        events=np.array([0, 1, ~1, 2, ~2], np.int64),
        marks=((0, "first", "setup"), (1, "first", "forward")),
        num_parameters=3,
        guesses=(Guess(op="aten.nonzero", module=None, answer="half"),),
        attention={"flash": 2},
        seconds=0.5,
    )


CONDITIONS = {"recipe": Recipe(), "sizes": {"batch_size": 8}, "device": ("8.0", None)}


def test_a_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    store = TraceCache("job", folder=tmp_path / "traces")
    store.keep(CONDITIONS, trace())
    found = store.find(CONDITIONS)
    assert found is not None
    for name in ("sizes", "storages", "marks", "num_parameters", "guesses", "attention", "seconds"):
        assert getattr(found, name) == getattr(trace(), name)
    assert found.events.tolist() == trace().events.tolist() and found.events.dtype == np.int64
    assert isinstance(found.storages[2].formula, Formula)
    assert [path.suffix for path in (tmp_path / "traces").iterdir()] == [".npz"]


def test_another_job_and_other_conditions_find_nothing(tmp_path: Path) -> None:
    TraceCache("job", folder=tmp_path).keep(CONDITIONS, trace())
    assert TraceCache("another", folder=tmp_path).find(CONDITIONS) is None
    other = {**CONDITIONS, "recipe": Recipe(precision="bf16")}
    assert TraceCache("job", folder=tmp_path).find(other) is None


@pytest.mark.parametrize(
    "file", ["memory/trace/tracer.py", "hardware/datasheet_rows.py", "memory/rules/another.py"]
)
def test_a_rule_that_changes_leaves_its_traces_behind(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("memory/trace/tracer.py", "hardware/datasheet_rows.py", "planner/forecast/trace_cache.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("rule = 1\n")
    monkeypatch.setattr(trace_cache, "PACKAGE", tmp_path)
    TraceCache("job", folder=tmp_path / "traces").keep(CONDITIONS, trace())
    (tmp_path / "planner" / "forecast" / "trace_cache.py").write_text("has no part in a trace\n")
    assert TraceCache("job", folder=tmp_path / "traces").find(CONDITIONS) is not None
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("rule = 2\n")
    assert TraceCache("job", folder=tmp_path / "traces").find(CONDITIONS) is None


def test_the_rules_are_those_of_this_package() -> None:
    files = [path for room in trace_cache.ROOMS for path in (trace_cache.PACKAGE / room).rglob("*.py")]
    assert trace_cache.PACKAGE / "memory" / "cuda" / "rules.py" in files and len(files) > 40


@pytest.mark.parametrize("content", [b"", b"nothing of numpy", b"PK\x03\x04 cut"])
def test_a_damaged_file_is_as_good_as_absent(content: bytes, tmp_path: Path) -> None:
    store = TraceCache("job", folder=tmp_path)
    store.keep(CONDITIONS, trace())
    (path,) = tmp_path.iterdir()
    path.write_bytes(content or path.read_bytes()[:-30])
    assert store.find(CONDITIONS) is None
    store.keep(CONDITIONS, trace())
    assert store.find(CONDITIONS) is not None


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = TraceCache("job", folder=tmp_path / "file" / "traces")
    store.keep(CONDITIONS, trace())
    assert store.find(CONDITIONS) is None


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "MOST_FILES", 3)
    store = TraceCache("job", folder=tmp_path)
    for number in range(5):
        store.keep(number, trace())
    assert len(list(tmp_path.iterdir())) == 3
    assert store.find(4) is not None


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    TraceCache("job").keep(CONDITIONS, trace())
    assert len(list((tmp_path / "traces").iterdir())) == 1


OWN = ("fingerprint_of_a_test", "json", "flatout.ground.units")


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
    monkeypatch.setattr(room, "installed_version", lambda package: "0.0")
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
