from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flatout.memory.cuda.formulas import Formula
from flatout.memory.jobs.job import Recipe
from flatout.memory.trace.record import Guess, Storage, Trace
from flatout.planner.forecast import trace_cache
from flatout.planner.forecast.trace_cache import TraceStore, traces_folder


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
    store = TraceStore("job", folder=tmp_path / "traces")
    store.keep(CONDITIONS, trace())
    found = store.find(CONDITIONS)
    assert found is not None and store.num_found == 1
    for name in ("sizes", "storages", "marks", "num_parameters", "guesses", "attention", "seconds"):
        assert getattr(found, name) == getattr(trace(), name)
    assert found.events.tolist() == trace().events.tolist() and found.events.dtype == np.int64
    assert isinstance(found.storages[2].formula, Formula)
    assert [path.suffix for path in (tmp_path / "traces").iterdir()] == [".npz"]


def test_another_job_and_other_conditions_find_nothing(tmp_path: Path) -> None:
    TraceStore("job", folder=tmp_path).keep(CONDITIONS, trace())
    assert TraceStore("another", folder=tmp_path).find(CONDITIONS) is None
    other = {**CONDITIONS, "recipe": Recipe(precision="bf16")}
    assert TraceStore("job", folder=tmp_path).find(other) is None


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
    TraceStore("job", folder=tmp_path / "traces").keep(CONDITIONS, trace())
    (tmp_path / "planner" / "forecast" / "trace_cache.py").write_text("has no part in a trace\n")
    assert TraceStore("job", folder=tmp_path / "traces").find(CONDITIONS) is not None
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("rule = 2\n")
    assert TraceStore("job", folder=tmp_path / "traces").find(CONDITIONS) is None


def test_the_rules_are_those_of_this_package() -> None:
    files = [path for room in trace_cache.ROOMS for path in (trace_cache.PACKAGE / room).rglob("*.py")]
    assert trace_cache.PACKAGE / "memory" / "cuda" / "rules.py" in files and len(files) > 40


@pytest.mark.parametrize("content", [b"", b"nothing of numpy", b"PK\x03\x04 cut"])
def test_a_damaged_file_is_as_good_as_absent(content: bytes, tmp_path: Path) -> None:
    store = TraceStore("job", folder=tmp_path)
    store.keep(CONDITIONS, trace())
    (path,) = tmp_path.iterdir()
    path.write_bytes(content or path.read_bytes()[:-30])
    assert store.find(CONDITIONS) is None
    store.keep(CONDITIONS, trace())
    assert store.find(CONDITIONS) is not None


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = TraceStore("job", folder=tmp_path / "file" / "traces")
    store.keep(CONDITIONS, trace())
    assert store.find(CONDITIONS) is None


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "MOST_FILES", 3)
    store = TraceStore("job", folder=tmp_path)
    for number in range(5):
        store.keep(number, trace())
    assert len(list(tmp_path.iterdir())) == 3
    assert store.find(4) is not None


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    assert traces_folder() == tmp_path / "traces"
    monkeypatch.delenv("FLATOUT_CACHE")
    assert traces_folder() == Path.home() / ".cache" / "flatout" / "traces"
