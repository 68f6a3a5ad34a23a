from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.ground.codec import encode
from flatout.ground.errors import BadInput
from flatout.tuner.check import check as checking
from flatout.tuner.check.answer import changes
from flatout.tuner.check.check import Checked, CheckOptions, check_against, check_sources
from flatout.tuner.check.trees import base_tree, working_tree
from flatout.tuner.results.prescription import Prescription, save_prescription
from flatout.tuner.trials import Trials
from tests.unit.tuner.check.test_answer import COUNTS
from tests.unit.tuner.check.test_trees import git
from tests.unit.tuner.results.test_prescription import KEPT, PROOF
from tests.unit.tuner.test_verdict import trial

SCRIPT = """
import torch
rows = int(open("rows").read())
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    loss = model(torch.randn(rows, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    # here
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "one")
    (tmp_path / "rows").write_text("16")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Trials, Any], float]], None]:
    """Replace runs by times that a function gives."""

    def give(seconds: Callable[[Trials, Any], float]) -> None:
        chance = random.Random(3)

        def run(trials: Trials, doses: Any, *, counts: bool = False, **_: Any) -> Any:
            trials.num_run += 1
            noise = math.exp(chance.gauss(0, 0.01))
            found = trial(seconds(trials, doses) * noise)
            return replace(found, counts=COUNTS) if counts else found

        monkeypatch.setattr(Trials, "run", run)

    return give


def test_a_source_that_reads_a_value_each_step_is_seen_by_its_counts(job: Path) -> None:
    (job / "train.py").write_text(SCRIPT.replace("# here", "loss.item()"))
    with base_tree("HEAD", ["train.py"]) as old:
        sides = [checking._Side(tree, CheckOptions()) for tree in (old, working_tree(["train.py"]))]
        with sides[0].trials, sides[1].trials:
            base, head = (side.count() for side in sides)
    launches, waits = changes(base.counts, head.counts)
    assert launches.head == launches.base + 1 and str(waits) == "waits 0 → 1"
    assert base.losses == head.losses and len(base.losses) == 9


def test_answers_of_times_that_are_given(job: Path, given: Any) -> None:
    head = str(job)
    for factor, answer in ((1.0, "ok"), (1.3, "slower")):
        given(lambda trials, doses, factor=factor: 0.1 * (factor if str(Path.cwd()) == head else 1.0))
        done = check_sources("HEAD", ["train.py"], CheckOptions())
        assert done.answer == answer and done.smallest is not None and done.smallest < 0.05
        assert done.slowdown is not None and done.slowdown.ratio == pytest.approx(factor, rel=0.03)
        assert done.changes == ()


def test_a_prescription_must_still_gain_what_was_proven(job: Path, given: Any) -> None:
    save_prescription(
        Prescription(command=("train.py",), treatments=KEPT[:1], proof=PROOF), job / "flatout.toml"
    )
    for factor, answer in ((1.5, "ok"), (1.1, "slower")):
        given(lambda trials, doses, factor=factor: 0.1 / factor if doses else 0.1)
        done = check_against(job / "flatout.toml", ["train.py"], CheckOptions())
        assert done.answer == answer and "1.50× [1.40, 1.60] was proven" in done.reason
    save_prescription(Prescription(command=("train.py",), treatments=()), job / "flatout.toml")
    with pytest.raises(BadInput, match="no proven gain"):
        check_against(job / "flatout.toml", ["train.py"], CheckOptions())


def test_counts_of_another_machine_are_compared_and_its_times_are_not(job: Path, given: Any) -> None:
    given(lambda trials, doses: 0.1)
    saved = job / "check.json"

    def save(**counts: Any) -> None:
        there = Checked(answer="ok", reason="", base="main", head_counts=replace(COUNTS, **counts))
        saved.write_text(json.dumps({"format": "flatout-check", "version": 1, **encode(there)}))

    save()
    assert check_against(saved, ["train.py"], CheckOptions()).answer == "ok"
    save(launches=50)
    done = check_against(saved, ["train.py"], CheckOptions())
    assert done.answer == "slower" and "launches 50 → 100" in done.reason and done.slowdown is None
    saved.write_text("{}")
    with pytest.raises(BadInput, match="not the result of a check"):
        check_against(saved, ["train.py"], CheckOptions())


def test_a_base_that_cannot_run_is_named(job: Path, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = trial(ended="crashed", error="ImportError: gone")
    monkeypatch.setattr(checking.Trials, "run", lambda trials, doses, **_: failed)
    with pytest.raises(BadInput, match=r"HEAD \(.*\) cannot be measured: the script raised ImportError"):
        check_sources("HEAD", ["train.py"], CheckOptions())
    with pytest.raises(BadInput, match=r"no script at other\.py"):
        check_sources("HEAD", ["other.py"], CheckOptions())
