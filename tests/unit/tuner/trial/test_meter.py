"""A job in this process under the meter: what is seen of it, and what a treatment in it cannot hide."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.measure.patches import Patches
from flatout.tuner import treatment as treatments
from flatout.tuner.child import TrialOptions
from flatout.tuner.treatment import Dose, Treatment, all_treatments
from flatout.tuner.trial import meter
from flatout.tuner.trial.meter import EndOfTrial, Meter, TrialResult
from flatout.tuner.trials import TrialPlan, TrialRun

PLAN = TrialPlan(warmup=2, blocks=2, block_steps=3)
Job = Callable[[], None]


def train(*, accumulate: int = 2, lr: float = 0.5) -> None:
    """A small job: dropout, two batches per step, a loss that is read."""
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    read = []
    for _epoch in range(10):
        for number, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
            loss = nn.functional.cross_entropy(model(a), b)
            loss.backward()
            read.append(loss.item())
            if number % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()


class LocalTrials:
    """Trials of a function, in this process."""

    def __init__(self, folder: Path, job: Job = train, plan: TrialPlan = PLAN) -> None:
        self.folder, self.job, self.plan, self.num_run = folder, job, plan, 0
        self.always: dict[str, Any] = {}

    def __enter__(self) -> LocalTrials:
        return self

    def __exit__(self, *_: object) -> None: ...

    def expect(self, label: str, units: object) -> None: ...

    at_once = 1

    def run_all(self, runs: Sequence[TrialRun]) -> list[TrialResult]:
        return [self.run(doses, **changes) for doses, changes in runs]

    def run(self, doses: Sequence[Dose], **changes: Any) -> TrialResult:
        self.num_run += 1
        plan = self.plan
        options = TrialOptions(
            result="",
            scratch="",
            warmup=plan.warmup,
            blocks=plan.blocks,
            block_steps=plan.block_steps,
            checked=(1, 2, plan.warmup, plan.num_steps),
        )
        patches = Patches()
        watching = Meter(replace(options, **self.always, **changes), patches)
        watching.prepare()
        gc.freeze()  # a trial has a process of its own; here earlier tests left objects
        try:
            treatments.install(doses, patches)
            watching.install()
            self.job()
            ended, error = "finished", None
        except EndOfTrial:
            ended, error = "measured", None
        except Exception as raised:  # noqa: BLE001 - as a trial does
            ended, error = "crashed", f"{type(raised).__name__}: {raised}"
        finally:
            patches.undo()
            gc.unfreeze()
        return watching.result(ended, error)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Treatment]:
    """Treatments of a test, beside the real ones."""
    known = dict(all_treatments())
    monkeypatch.setattr(treatments, "all_treatments", lambda: known)
    return known


def test_a_job_is_seen_whole(tmp_path: Path) -> None:
    found = LocalTrials(tmp_path).run([])
    assert found.ended == "measured" and found.num_steps == PLAN.num_steps == 9
    assert len(found.blocks_s) == 2 and min(found.blocks_s) > 0
    assert len(found.losses) == 18 and found.num_losses_at_start == 4
    assert found.reads == found.losses  # the script reads each of them
    assert sorted(found.checked) == ["1", "2", "9"]
    assert len(found.checked["1"].gradients) == len(found.checked["1"].parameters) == found.trained == 4
    assert found.batches.keys() == {"1.1", "1.2", "1.9"} and len(set(found.batches.values())) == 3
    assert (found.still, found.still_at_end, found.num_skipped) == (0, 0, 0)
    assert found.formats == ("float32",) * 4 and found.before_s is not None


def test_blocks_of_short_steps_grow_where_only_times_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "LEAST_BLOCK_S", 1e9)  # no block is ever long enough
    grown = LocalTrials(tmp_path).run([], most_block_steps=10, checked=(1, 2))
    assert grown.ended == "measured" and len(grown.blocks_s) == 2
    assert grown.num_steps == 2 + 2 * 9 + 1  # in multiples of three
    monkeypatch.setattr(meter, "LEAST_BLOCK_S", 0.0)
    assert LocalTrials(tmp_path).run([], most_block_steps=10).num_steps == PLAN.num_steps
    assert replace(PLAN, seen_steps=100).most_block_steps == 48 and PLAN.most_block_steps < 0


def test_the_same_job_is_the_same_and_a_seed_makes_another(tmp_path: Path) -> None:
    trials = LocalTrials(tmp_path)
    one, same, other = trials.run([]), trials.run([]), trials.run([], seed=1)
    assert (one.losses, one.checked, one.batches, one.start) == (
        same.losses, same.checked, same.batches, same.start
    )  # fmt: skip
    assert other.losses != one.losses and other.start != one.start


def test_a_script_that_ends_or_raises_is_told_apart(tmp_path: Path) -> None:
    def raises() -> None:
        raise ValueError("no data")

    assert LocalTrials(tmp_path, lambda: None).run([]).ended == "finished"
    assert LocalTrials(tmp_path, raises).run([]).error == "ValueError: no data"


def test_steps_that_a_scaler_skips_are_counted(tmp_path: Path) -> None:
    def scaled() -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(20):
            loss = model(torch.ones(1, 2)).sum() * (float("inf") if step == 4 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    def empty() -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(20):
            optimizer.zero_grad()
            if step != 4:
                model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    for job in (scaled, empty):
        assert LocalTrials(tmp_path, job).run([]).num_skipped == 1, job


def test_treatments_are_switched_in_blocks_of_one_run(tmp_path: Path, given: dict[str, Treatment]) -> None:
    """One that does nothing and one that takes seven of eight products away."""
    state = {"slow": True, "on": 0}

    class Faster:
        def __init__(self, _patches: Patches, _value: object) -> None: ...

        def on(self) -> None:
            state["slow"], state["on"] = False, state["on"] + 1

        def off(self) -> None:
            state["slow"] = True

    def job() -> None:
        model, big = nn.Linear(2, 2), torch.randn(400, 400)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            for _ in range(8 if state["slow"] else 1):
                big @ big
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    given["faster"] = Treatment(
        name="faster", safety="exact", summary="", propose=lambda case: [True],
        install=lambda patches, value: None, switch=Faster,
    )  # fmt: skip
    found = LocalTrials(tmp_path, job).run([], arms=(Dose(name="faster", value=True),), seconds=20.0)
    assert found.ended == "measured" and state["on"] >= 3 and state["slow"]
    arms = {arm.label: arm for arm in found.arms}
    assert arms.keys() == {"same", "faster"}
    assert arms["faster"].low > 1.5 and arms["faster"].ratio > 2 * arms["same"].ratio
