"""The benchmarks of scale: nodes that are killed and a network that stalls lose nothing, and parts add up."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NODE, NETWORK = "kill -9 of a node, started again", "the network stalls"


@pytest.fixture
def load_module(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("docs", "benchmarks", "benchmarks/scale"):
        monkeypatch.syspath_prepend(str(repository / folder))

    def load(name: str) -> Any:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def run_benchmark(repository: Path, script: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(repository / "benchmarks" / "scale" / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(900)  # nine processes import torch
def test_a_killed_node_and_a_stalled_network_cost_an_evolution_nothing(repository: Path) -> None:
    """Two torchrun agents; without the right to a network namespace the network does not stall."""
    options = ["--verb", "evolve", "--stall", "3", "--fault", NODE]
    may_stall = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0
    options += ["--fault", NETWORK] if may_stall else ["--inside"]
    rows = run_benchmark(repository, "faults_training.py", *options)["rows"]
    assert [row["fault"] for row in rows] == [NODE, NETWORK][: len(rows)] and len(rows) == 1 + may_stall
    assert all(row["iterations"] == 41 and row["lost"] == 0 for row in rows), rows


def test_what_a_rank_adds_to_a_diagnosis_does_not_grow_with_their_number(repository: Path) -> None:
    rows = run_benchmark(repository, "merging.py", "--ranks", "8", "64")
    assert 512 * rows["64 ranks"]["folder_bytes_per_rank"] < 50e6


def test_one_page_shows_all_of_64_nodes_and_a_restart_of_it_loses_no_sample(repository: Path) -> None:
    pytest.importorskip("starlette", reason="starlette is not installed: flatout[web]")
    found = run_benchmark(repository, "watching.py", "--nodes", "64", "--seconds", "5")
    for arm in ("folder", "pages"):
        assert (found[arm]["nodes_seen"], found[arm]["samples_lost_by_restart"]) == (64, 0)
        assert found[arm]["samples_written"] > 0


def test_what_phases_lose_adds_up_to_what_is_lost(load_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training = load_module("efficiency_training")
    runs = {1: [{"steps": 8.0, "files": 2.0}], 2: [{"steps": 4.0, "files": 2.0, "exchange": 1.0}]}
    for shares_gpu, efficiency in ((False, 10 / 14), (True, 10 / 7)):
        monkeypatch.setattr(training, "SHARES_GPU", shares_gpu)
        found = training.compare(runs)
        assert found["efficiency"] == pytest.approx(efficiency, abs=1e-4)
        assert sum(row["lost"] for row in found["phases"]) == pytest.approx(1 - efficiency, abs=1e-3)


def test_what_a_second_worker_or_node_loses_adds_up(load_module: Any) -> None:
    efficiency = load_module("efficiency")
    alone = {"ends_s": [10.0], "rows": 100, "join_s": 0.0}
    together = {"ends_s": [5.0, 6.0], "rows": 100, "join_s": 3.0}
    nodes = [
        {"seconds": 70.0, "busy_s": 66.0, "start_end_s": 3.0, "waits_s": 1.0},
        {"seconds": 40.0, "busy_s": 67.0, "start_end_s": 5.0, "waits_s": 8.0},
    ]
    for found in (efficiency.compare(alone, together), efficiency.compare_tunings(*nodes)):
        lost = sum(value for name, value in found.items() if name.startswith("lost_"))
        assert found["efficiency"] + lost == pytest.approx(1)
    # On one GPU two workers that take as long as one lose nothing.
    assert efficiency.compare_on_gpu(alone, together)["efficiency"] == pytest.approx(10 / 6)
    (phase,) = efficiency.compare_on_gpu(alone, {**together, "ends_s": [12.0, 12.5]})["phases"]
    assert phase["lost"] == pytest.approx(0.2)


def test_every_verb_on_one_gpu_has_a_row(load_module: Any, tmp_path: Path) -> None:
    figures = load_module("scale_figures")
    phase = {"phase": "rows", "lost": 0.2, "reason": "they take turns"}
    result = {"efficiency": 0.8, "phases": [phase]}
    for verb in ("evolve", "adapt", "search"):
        path = tmp_path / f"efficiency-gpu-{verb}_nvidia-h200_2026-11-18.json"
        path.write_text(json.dumps(result))
    _, _, *rows = figures.efficiency(tmp_path).splitlines()
    assert rows == [
        f"| {verb}, two processes on one GPU | 0.80 | rows 20.0 (they take turns) |"
        for verb in ("evolve", "adapt", "steer search")
    ]
