"""Probes on a real GPU.  Each runs in a script of its own, as a user's process that has not met CUDA yet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

WIDTH, DEPTH = 1024, 4
SCRIPT = f"""\
import dataclasses, json, sys
import torch
from torch import nn
from flatout.hardware.nvml import read_gpus
from flatout.memory.predict.forecast import Forecaster
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.probe.run_probe import probe
from flatout.memory.probe.probe_results import correct


def make_model():
    layers = [nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.GELU()) for _ in range({DEPTH})]
    return nn.Sequential(*layers)


def make_batch(batch_size):
    return torch.randn(batch_size, {WIDTH})


def loss(model, batch):
    return model(batch).float().square().mean()


SIZES = {{"batch_size": 65536}}
job = Job(name="stack", make_model=make_model, make_batch=make_batch, loss=loss, sizes=SIZES)
recipe = Recipe(precision="bf16", accumulation=2)


def main():
    if sys.argv[1] == "used":
        torch.zeros(1, device="cuda")
    receipt = probe(job, recipe)
    forecaster = Forecaster(job, device=read_gpus().gpus[0].device, context=receipt.context)
    full = forecaster.estimate(recipe)
    there = [forecaster.estimate(recipe, sizes={{"batch_size": each.batch_size}}) for each in receipt.probes]
    better = correct(full, receipt, at_probes=there)
    measured = probe(job, recipe, batch_sizes=(65536,))
    print(json.dumps({{
        "receipt": dataclasses.asdict(receipt),
        "missed": [p.peak_allocated_bytes - e.peak_allocated_bytes for p, e in zip(receipt.probes, there)],
        "corrected": [better.peak_allocated_bytes, better.peak_reserved_bytes],
        "measured": [measured.probes[0].peak_allocated_bytes, measured.probes[0].peak_reserved_bytes],
        "initialized": torch.cuda.is_initialized(),
    }}))


if __name__ == "__main__":
    main()
"""


def run_script(folder: Path, how: str) -> Any:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), how]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", ["untouched", "used"])
def test_a_probe_corrects_the_estimate_of_a_larger_batch(tmp_path: Path, how: str) -> None:
    """`used`: CUDA is initialised in the parent, and the job is sent to another process."""
    said = run_script(tmp_path, how)
    receipt = said["receipt"]
    small, large = receipt["probes"]
    assert 1 <= small["batch_size"] < large["batch_size"] <= 65536 // 4
    assert small["peak_allocated_bytes"] <= large["peak_allocated_bytes"] <= large["peak_reserved_bytes"]
    assert all(probe["micro_batch_s"] > 0 for probe in receipt["probes"])
    if receipt["context_bytes"] is None:
        assert "another process" in receipt["context_missing"]
    else:
        assert 100 * 2**20 < receipt["context_bytes"] < 2 * 2**30
    for corrected, measured in zip(said["corrected"], said["measured"], strict=True):
        assert abs(corrected - measured) <= 0.03 * measured
    assert said["initialized"] == (how == "used")


NATIVE = """\
import torch
from torch import nn
from flatout.memory.predict.allocator import simulate
from flatout.memory.predict.forecast import estimate_job
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.predict.replay import with_own_sizes
from flatout.memory.trace.tracer import trace_job

job = Job(
    name="stack",
    make_model=lambda: nn.Sequential(nn.Embedding(1000, 512), nn.Linear(512, 2048), nn.GELU()),
    make_batch=lambda batch_size: torch.zeros(batch_size, 64, dtype=torch.long),
    loss=lambda model, batch: model(batch).square().mean(),
    sizes={"batch_size": 64},
)
estimated = estimate_job(job, Recipe(), device="H200").peak_allocated_bytes
torch.zeros(1, device="cuda")
trace = trace_job(job, Recipe(), device="cuda")
print(simulate(trace.events, with_own_sizes(trace).num_bytes).peak_allocated_bytes, estimated)
"""


def test_fake_tensors_of_cuda_agree_with_the_emulation() -> None:
    done = subprocess.run([sys.executable, "-c", NATIVE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    native, estimated = map(int, done.stdout.split())
    assert abs(native - estimated) <= 0.02 * native
