"""Treatments that do something on a GPU alone: trials of a small job under each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.tuner import verdict
from flatout.tuner.results.machine import measure
from flatout.tuner.treatment import read_dose
from flatout.tuner.trials import TrialPlan, Trials, pair_of

pytestmark = pytest.mark.gpu

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(4096, 256), torch.randint(0, 8, (4096,)))
model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for _ in range(100):
    for x, y in DataLoader(data, batch_size=64, shuffle=True):
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""
PLAN = TrialPlan(warmup=5, blocks=2, block_steps=5, limit_s=300.0)
EXACT = ("device-prefetch=2", "pinned-memory", "expandable-segments")
NEAR = (
    "foreach-optimizer",
    "fused-optimizer",
    "compile=default",
    "compile=reduce-overhead",
    "autocast=float16",
    "autocast=bfloat16",
)


def test_losses_are_the_same_or_nearly_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    wrong = []
    with Trials(["train.py"], module=False, plan=PLAN) as trials:
        plain = trials.run([], counts=True)
        assert verdict.failure(plain) is None, plain
        counts = plain.counts
        if counts is None or counts.launches <= 10 or (counts.copied_bytes or 0.0) <= 64 * 256 * 4:
            wrong.append(f"a batch of {64 * 256 * 4} bytes was copied: {counts}")
        for text in (*EXACT, *NEAR):
            found = trials.run([read_dose(text)])
            if reason := verdict.failure(found, like=plain):
                wrong.append(f"{text}: {reason}")
            elif text in EXACT and found.losses != plain.losses:
                wrong.append(f"{text}: other losses")
            elif abs(found.losses[-1] - plain.losses[-1]) > 0.02 * plain.losses[-1]:
                wrong.append(f"{text}: {found.losses[-1]} instead of {plain.losses[-1]}")
    assert not wrong, "\n".join(wrong)


def test_runs_that_start_beside_each_other_compute_what_one_alone_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    with Trials(["train.py"], module=False, plan=PLAN) as trials:
        alone = trials.run([], timed=True)
        trials.at_once = 4
        (one, other), (another, compiled) = trials.run_pairs(
            [pair_of([], []), pair_of([], [read_dose("compile=default")])]
        )
    for run in (alone, one, other, another, compiled):
        assert verdict.failure(run) is None, run
    assert all(run.losses == alone.losses for run in (one, other, another))
    assert abs(compiled.losses[0] - alone.losses[0]) < 1e-3 * alone.losses[0]


def test_latencies_of_this_machine_are_those_of_a_gpu() -> None:
    launch_s, read_s = measure()
    assert 1e-7 < launch_s < 1e-3 and read_s is not None and 1e-6 < read_s < 1e-2
