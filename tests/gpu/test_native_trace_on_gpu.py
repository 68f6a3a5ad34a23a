"""Native estimates of small models on a real GPU, beside the peak of a real step and the estimate by rules.

Each model is stepped for real in a process of its own, as the probe does it.  The script's own process has
not met CUDA, or has (`used`): then jobs are sent to a process that starts from nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

BOUND = 0.02
SCRIPT = """\
import json, sys
from functools import partial
import torch
import torch.nn.functional as F
from torch import nn
from flatout.memory.predict.forecast import Forecaster, estimate_job
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.probe.run_probe import probe


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(512, 1536), nn.Linear(512, 512)

    def forward(self, x):
        q, k, v = self.inward(x).view(*x.shape[:2], 3, 8, 64).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outward(mixed.transpose(1, 2).reshape(x.shape))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(256, 512, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.layers(x)[0]


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(1000, 512), nn.Linear(512, 512)

    def forward(self, tokens):
        return self.last(self.table(tokens)[tokens > 4])


def mlp():
    layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Dropout(0.1), nn.Linear(4096, 1024))]
    return nn.Sequential(*layers, nn.LayerNorm(1024))


def convolutions():
    first = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
    return nn.Sequential(first, nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())


def encoder():
    return nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)


def random(batch_size, shape):
    return torch.randn(batch_size, *shape)


def tokens(batch_size):
    return torch.arange(batch_size * 64).reshape(batch_size, 64) % 1000


def loss(model, batch):
    return model(batch).float().square().mean()


def job(name, make_model, batch_size, shape=None):
    make_batch = tokens if shape is None else partial(random, shape=shape)
    sizes = {"batch_size": batch_size}
    return Job(name=name, make_model=make_model, make_batch=make_batch, loss=loss, sizes=sizes)


def cases():
    attention = job("attention", Attention, 64, (512, 512))
    stack = job("mlp", mlp, 16384, (1024,))
    images = job("convolutions", convolutions, 64, (32, 64, 64))
    return {
        "mlp": (stack, Recipe()),
        "mlp-bf16-accumulated": (stack, Recipe(precision="bf16", accumulation=2, clip_norm=1.0)),
        "mlp-fp16": (stack, Recipe(precision="fp16")),
        "attention": (attention, Recipe()),
        "attention-bf16": (attention, Recipe(precision="bf16")),
        "convolutions": (images, Recipe()),
        "convolutions-bf16": (images, Recipe(precision="bf16")),
        "lstm": (job("lstm", Recurrent, 64, (128, 256)), Recipe()),
        "lstm-bf16": (job("lstm", Recurrent, 64, (128, 256)), Recipe(precision="bf16")),
        "mask": (job("mask", Chosen, 1024), Recipe()),
        "encoder": (job("encoder", encoder, 64, (256, 512)), Recipe(precision="bf16")),
        "evaluated": (stack, Recipe(mode="evaluate")),
    }


def peaks(found):
    return [found.peak_allocated_bytes, found.peak_reserved_bytes]


def compared(job, recipe):
    answer = {}
    try:
        native = estimate_job(job, recipe, native=True)
        assert native.native
        answer["native"] = peaks(native)
        answer["rules"] = peaks(estimate_job(job, recipe, device="H200"))
        receipt = probe(job, recipe, batch_sizes=(job.sizes["batch_size"],))
        answer["measured"] = peaks(receipt.probes[0])
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer


def main():
    if sys.argv[1] == "used":
        torch.zeros(1, device="cuda")
    chosen = {name: case for name, case in cases().items() if name in sys.argv[2].split(",")}
    result = {name: compared(*case) for name, case in chosen.items()}
    job, recipe = cases()["mlp"]
    forecaster = Forecaster(job, native=True)
    replayed = forecaster.simulate(forecaster.what_if(recipe, sizes={"batch_size": 3000}))
    traced = forecaster.estimate(recipe, sizes={"batch_size": 3000})
    print(json.dumps({
        "cases": result,
        "replayed": peaks(replayed),
        "traced": peaks(traced),
        "initialized": torch.cuda.is_initialized(),
    }))


if __name__ == "__main__":
    main()
"""
CASES = [
    "mlp",
    "mlp-bf16-accumulated",
    "mlp-fp16",
    "attention",
    "attention-bf16",
    "convolutions",
    "convolutions-bf16",
    "lstm",
    "lstm-bf16",
    "mask",
    "encoder",
    "evaluated",
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_script(tmp_path_factory.mktemp("untouched"), "untouched", CASES)


def run_script(folder: Path, how: str, cases: list[str]) -> Any:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), how, ",".join(cases)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_a_native_estimate_is_near_the_real_step_and_the_rules(answers: Any, name: str) -> None:
    found = answers["cases"][name]
    assert "error" not in found, found["error"]
    native, ruled, measured = (found[arm][0] for arm in ("native", "rules", "measured"))
    assert abs(native - measured) <= BOUND * measured, found
    assert abs(native - ruled) <= BOUND * ruled, found


def test_native_traces_are_replayed(answers: Any) -> None:
    assert answers["replayed"] == answers["traced"]
    assert not answers["initialized"]


def test_a_process_that_used_cuda_traces_natively_in_another(tmp_path: Path) -> None:
    said = run_script(tmp_path, "used", ["mlp"])
    assert said["initialized"]
    found = said["cases"]["mlp"]
    assert "error" not in found, found["error"]
    assert abs(found["native"][0] - found["measured"][0]) <= BOUND * found["measured"][0]


LIVE = """\
import json
print("the script runs")
import torch
from torch import nn
import flatout


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))

    def forward(self, x):
        return self.layers(x)


def peaks(model, batch, optimizer):
    said = {"loss": lambda model, batch: model(batch).square().mean(), "optimizer": optimizer}
    ruled, native = (flatout.plan(model, batch, native=native, **said) for native in (False, True))
    return [ruled.peak_allocated_bytes, native.peak_allocated_bytes]


model, batch = Net(), torch.randn(512, 1024)
before = peaks(model, batch, torch.optim.AdamW)
model, batch = model.cuda(), batch.cuda()
optimizer = torch.optim.AdamW(model.parameters())
model(batch).square().mean().backward()
optimizer.step()
print(json.dumps([before, peaks(model, batch, optimizer)]))
"""


def test_a_model_that_trains_on_the_gpu_is_planned_as_it_was_before(tmp_path: Path) -> None:
    script = tmp_path / "live.py"
    script.write_text(LIVE)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, last = done.stdout.splitlines()
    assert said == "the script runs"
    before, after = json.loads(last)
    assert before == after
