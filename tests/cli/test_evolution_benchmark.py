"""The evolution benchmarks run, keep what they have, and go on without an arm that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
    out.mkdir()
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
    sizes = ("--models", "tiny", "--rounds", 1, "--timed", 1, "--new", 2, "--population", 4, "--prompts", 2)
    found = saved_by("ladder.py", *sizes, "--no-compile", "--mode", "fused", folder=tmp_path)
    arms = {row["arm"]: row for row in found["models"][0]["arms"]}
    assert "needs a CUDA device" in arms.pop("one forward")["failed"]
    assert {"original", "+ batching", "+ AMP"} == arms.keys()
    assert all(row["samples_per_s"] > 0 for row in arms.values())


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

arms = {"original": Quick(), "+ compile": Endless(), "one forward": Quick()}
ladder.climb.__globals__["arms_of"] = lambda *given: arms
kept = []
ladder.climb("tiny", argparse.Namespace(rounds=1, limit=0.5), torch.device("cpu"), kept.append)
print(json.dumps(kept[-1]))
"""


def test_a_rung_past_its_limit_is_named_and_left_out() -> None:
    done = warm().run("python", "-c", ENDLESS, FOLDER / "ladder.py")
    assert done.returncode == 0, done.stderr
    arms = {row["arm"]: row for row in json.loads(done.stdout.splitlines()[-1])}
    assert arms.pop("+ compile") == {"arm": "+ compile", "failed": "OverLimit: took longer than 0.5 s"}
    assert {"original", "one forward"} == arms.keys()
    assert all(row["samples_per_s"] > 0 for row in arms.values())
