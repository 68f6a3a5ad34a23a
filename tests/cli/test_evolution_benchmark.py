"""The evolution benchmarks run, keep what they have, and go on without an arm that fails."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the benchmarks' models are transformers models")

from tests.support.warm_python import warm

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "evolution"


def saved_by(script: str, *flags: object, folder: Path) -> dict[str, Any]:
    done = warm().run("python", FOLDER / script, *map(str, flags), "--save", folder)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_learning_is_bound_by_epochs_and_has_a_random_search_beside_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    made = warm().run("python", ROOT / "examples" / "evolution" / "tiny_model.py", model)
    assert made.returncode == 0, made.stderr
    sizes = ("--population", 16, "--prompts", 4, "--held-out", 16, "--rows", 64, "--max-tokens", 32)
    task = ("--task", "digit-copy", "--task-option", "token_ids=true", "length=2")
    out = tmp_path / "out"
    ends = ("--epochs", 3, "--every", 1, "--random")
    found = saved_by("learn.py", "--model", model, *task, *sizes, *ends, folder=out)
    assert [point["epoch"] for point in found["curve"]] == [0, 1, 2, 3]
    assert found["epochs"] == 3 and 0 <= found["random_search"]["held_out"] <= 1


def test_kernels_are_kept_beside_each_arm(tmp_path: Path) -> None:
    sizes = ("--rows", 4, "--new", 2, "--rounds", 1, "--threads", 1, "--ranks", 1, 4)
    arms = ("--prompts-per-member", 1, "--together", 2, "--swap-prompts", 1, "--kernels")
    found = saved_by("run.py", "--models", "tiny", *sizes, *arms, folder=tmp_path)
    (model,) = found["models"]
    assert [row["rank"] for row in model["arms"]] == [1, 4] and len(model["swap"]) == 1
    assert all("aten::mm" in row["kernels_ms"] for row in model["arms"])
    assert "aten::mm" in model["plain_kernels_ms"]


def test_a_ladder_goes_on_without_an_arm_that_fails(tmp_path: Path) -> None:
    sizes = ("--models", "tiny", "--rounds", 1, "--new", 2, "--population", 4, "--prompts", 2)
    found = saved_by("ladder.py", *sizes, "--no-compile", "--mode", "fused", folder=tmp_path)
    arms = {row["arm"]: row for row in found["models"][0]["arms"]}
    assert "needs a CUDA device" in arms.pop("one forward")["failed"]
    assert {"original", "+ batching", "+ AMP"} == arms.keys()
    assert all(row["samples_per_s"] > 0 for row in arms.values())


def test_rungs_run_as_long_as_a_round_takes(tmp_path: Path) -> None:
    """A watcher of the GPU sees little of a round of milliseconds."""
    sizes = ("--models", "tiny", "--rounds", 1, "--new", 1, "--population", 2, "--prompts", 1)
    found = saved_by("ladder.py", *sizes, "--no-compile", "--seconds", 0.5, folder=tmp_path)
    assert all(row["round_s"] >= 0.5 for row in found["models"][0]["arms"])


def test_a_second_run_of_a_day_leaves_the_first_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    interleaved = importlib.import_module("interleaved")
    for number in (1, 2):
        result = {"hardware": "NVIDIA H200", "date": "2026-01-02", "number": number}
        file = interleaved.ResultFile(tmp_path / "out", subject="ladder-tiny", result=result)
        file.write()
        file.write()
    names = ["ladder-tiny_nvidia-h200_2026-01-02.json", "ladder-tiny_nvidia-h200_2026-01-02-2.json"]
    kept = [json.loads((tmp_path / "out" / name).read_text(encoding="utf-8")) for name in names]
    assert [one["number"] for one in kept] == [1, 2]


@pytest.mark.parametrize(
    ("runs", "joined", "figures"),
    [
        (
            "adapters/results/real-seed?_nvidia-h200_2026-11-18.json",
            "adapters/results/seeds-real_nvidia-h200_2026-11-18.json",
            ("routing/accuracy_share", "scores/*/by_task/*/*"),
        ),
        (
            "evolution/results/learn-arithmetic-seed?_nvidia-h200_2026-11-18.json",
            "evolution/results/seeds-learn-arithmetic_nvidia-h200_2026-11-18.json",
            ("curve/-1/*",),
        ),
    ],
)
def test_runs_of_several_seeds_have_the_means_that_are_kept(
    runs: str, joined: str, figures: tuple[str, ...], tmp_path: Path
) -> None:
    benchmarks = FOLDER.parent
    wanted = [flag for figure in figures for flag in ("--figure", figure)]
    files = sorted(benchmarks.glob(runs))
    done = warm().run("python", benchmarks / "seeds.py", *files, *wanted, "--save", tmp_path / "seeds.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "seeds.json").read_text(encoding="utf-8"))["figures"]
    kept = json.loads((benchmarks / joined).read_text(encoding="utf-8"))["figures"]
    for name, figure in kept.items():
        assert found[name]["values"] == figure["values"]
        assert [found[name][part] for part in ("mean", "low", "high")] == pytest.approx(
            [figure[part] for part in ("mean", "low", "high")]
        )


ENDLESS = """
import argparse, json, runpy, sys, torch
ladder = argparse.Namespace(**runpy.run_path(sys.argv[1]))

class Quick:
    def epoch(self):
        return 1

class Endless:
    def epoch(self):
        while True:
            try:
                while True:
                    pass
            except Exception:
                pass

arms = {name: Quick() for name in ("original", "+ compile", "one forward")} | {sys.argv[2]: Endless()}
ladder.climb.__globals__["arms_of"] = lambda *given: arms
kept = []
ladder.climb("tiny", argparse.Namespace(rounds=1, seconds=0, limit=0.5), torch.device("cpu"), kept.append)
print(json.dumps(kept[-1]))
"""


@pytest.mark.parametrize("slow", ["original", "+ compile"])
def test_a_rung_past_its_limit_is_named_and_left_out(slow: str) -> None:
    done = warm().run("python", "-c", ENDLESS, FOLDER / "ladder.py", slow)
    assert done.returncode == 0, done.stderr
    arms = {row["arm"]: row for row in json.loads(done.stdout.splitlines()[-1])}
    assert arms.pop(slow) == {"arm": slow, "failed": "OverLimit: took longer than 0.5 s"}
    assert len(arms) == 2
    assert all(row["samples_per_s"] > 0 for row in arms.values())
    assert all((row["times_the_original"] is None) == (slow == "original") for row in arms.values())


def result_of(name: str) -> dict[str, Any]:
    (path,) = (FOLDER / "results").glob(f"{name}.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_what_the_bytes_of_factors_leave_is_computed_from_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the page of evolution and that of its benchmark say so, with the figures of the result files."""
    monkeypatch.syspath_prepend(str(FOLDER))
    limits, shapes = importlib.import_module("limits"), importlib.import_module("shapes")
    tiny = shapes.SHAPES["tiny"]
    products = shapes.build(tiny, device="cpu", dtype=torch.float32).projections().values()
    numbers = sum(sum(product.weight.shape) for product in products)
    assert limits.factor_bytes(tiny, rank=4, members=10) == numbers * 4 * 10 // 2

    benchmark = (FOLDER / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "evolution.md").read_text(encoding="utf-8")
    files = {"1.5B": "ranks-qwen2.5-1.5b_*", "4B": "evolution-qwen3-4b_*"}
    for label, name in files.items():
        found = result_of(name)
        (model, *_) = found["models"]
        plain_s = model["rows"] * found["new"] / model["arms"][0]["plain_tokens_per_s"]
        assert f"{plain_s:.3g} s ({label})" in benchmark
        left = [
            limits.left_by_factors(
                shapes.SHAPES[model["model"]],
                rank=rank,
                members=model["rows"],
                steps=found["new"],
                plain_s=plain_s,
            )
            for rank in (1, 4, 16)
        ]
        cells = [f"{one:.2f}; " for one in left]
        (row,) = [line for line in benchmark.splitlines() if line.startswith(f"| {label}: bytes alone")]
        assert [one in cell for one, cell in zip(cells, row.split(" | ")[1:], strict=True)] == [True] * 3
        if label == "1.5B":
            assert f"would leave {left[1]:.2f} and {left[2]:.2f}" in page
            before = sum(model["plain_kernels_ms"][kernel] for kernel in ("gate_up", "add_norm", "attend"))
            more = [
                sum(arm["kernels_ms"][kernel] for kernel in ("gate_up", "add_norm", "attend")) - before
                for arm in model["arms"]
            ]
            assert f"of {plain_s:.2f} s, gate" in page
            assert f"{more[0] / 1e3:.2g} s more at rank 4\nand {more[1] / 1e3:.2g} s more at rank 16" in page
