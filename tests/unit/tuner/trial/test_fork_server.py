"""Trials that fork from a process that has imported torch: they see and compute what a plain start does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.tuner import verdict
from flatout.tuner.treatment import Dose
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trials import TrialPlan, Trials

SCRIPT = """
import os, sys
{before}
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(1000):
    x = torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with open("log.txt", "a") as file:
        print(os.getcwd(), sys.argv, __file__, __name__, os.getsid(0) == os.getpid(), file=file)
"""
PLAN = TrialPlan(warmup=2, blocks=2, block_steps=2, limit_s=60.0)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trials]:
    monkeypatch.chdir(tmp_path)

    def make(*, before: str = "", arguments: tuple[str, ...] = ()) -> Trials:
        (tmp_path / "train.py").write_text(SCRIPT.format(before=before))
        return Trials(["train.py", *arguments], module=False, plan=PLAN)

    return make


def succeeds(run: TrialResult) -> bool:
    return verdict.failure(run) is None


def test_a_forked_trial_computes_what_a_plain_one_does_and_leaves_nothing(
    start: Callable[..., Trials], tmp_path: Path
) -> None:
    with start() as trials:
        plain = trials.run([])
        server = trials._server
        assert succeeds(plain) and server is not None
        forked, treated = trials.run([]), trials.run([Dose(name="garbage-every", value=2)])
        assert trials._forks and trials._server is server
    assert verdict.is_reproducible(plain, forked) and verdict.differs_exactly(forked, treated) is None
    assert plain.losses == forked.losses and plain.checked == forked.checked
    assert server._server.returncode is not None  # it has ended
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_script_that_sets_its_environment_before_torch_always_starts_plainly(
    start: Callable[..., Trials],
) -> None:
    with start(before="os.environ['MKL_CBWR'] = 'COMPATIBLE'") as trials:
        assert succeeds(trials.run([])) and trials._server is None


def test_a_trial_whose_server_was_killed_starts_plainly(start: Callable[..., Trials]) -> None:
    with start() as trials:
        first = trials.run([])
        assert trials._server is not None
        trials._server._server.kill()
        trials._server._server.wait()
        again = trials.run([])
    assert succeeds(again) and first.losses == again.losses


def test_a_job_that_cannot_be_forked_runs_again_as_it_starts_plainly(start: Callable[..., Trials]) -> None:
    with start(before="assert os.getppid() == int(sys.argv[1])", arguments=(str(os.getpid()),)) as trials:
        assert succeeds(trials.run([])) and trials._server is not None
        assert succeeds(trials.run([])) and trials._server is None  # the fork has another parent
