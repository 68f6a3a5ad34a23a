"""Trials through frameworks: loops that are not in the script, and several processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flatout.tuner import verdict
from flatout.tuner.treatment import Dose
from flatout.tuner.trials import TrialPlan, Trials
from tests.support.cli import ENVIRONMENT, SCRIPTS
from tests.support.warm_python import warm

PLAN = TrialPlan(warmup=2, blocks=2, block_steps=2, limit_s=200.0)
DOSES = (
    Dose(name="prefetch-factor", value=4),
    Dose(name="garbage-every", value=2),
    Dose(name="fused-optimizer", value=True),
)


@pytest.fixture(autouse=True)
def warm_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(warm().bin / "python"))


@pytest.mark.parametrize(
    ("script", "per_step"), [("hugging_face.py", 1), ("accelerated.py", 2), ("lightning_module.py", 1)]
)
def test_a_trial_of_a_framework_sees_its_steps_and_losses_under_treatments(
    script: str, per_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with Trials([str(SCRIPTS / script), "out"], module=False, plan=PLAN) as trials:
        found = trials.run(DOSES)
    assert verdict.failure(found) is None, found
    assert found.num_steps == PLAN.num_steps and len(found.losses) == per_step * PLAN.num_steps
    assert found.trained > 0 and found.still == 0
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_make_one_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Trials([str(SCRIPTS / "ranks.py")], module=False, plan=PLAN, ranks=2) as trials:
        found = trials.run(DOSES)
        assert verdict.failure(found) is None, found
        other = list(trials.folder.glob("1/result.1.json"))
    assert found.num_steps == PLAN.num_steps and len(found.losses) == PLAN.num_steps
    assert len(other) == 1  # the second rank ended as the first did
