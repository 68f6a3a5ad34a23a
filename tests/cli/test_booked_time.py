"""Where the time of a step is booked, by comparing the phases of the median step."""

from __future__ import annotations

import statistics
from pathlib import Path

from flatout.doctor.loading import made_by
from flatout.measure.evidence import Evidence
from tests.support.cli import ARMS, assert_measured, line_of, observe


def typical_s(evidence: Evidence, phase: str) -> float:
    """Of one phase; what else the machine does falls on few of the steps."""
    return statistics.median(step.phases_s[phase] for step in evidence.kept("real"))


def test_the_closure_of_lbfgs_is_not_optimizer_time(tmp_path: Path) -> None:
    evidence = observe("lbfgs.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "LBFGS.step"
    assert {step.num_batches for step in evidence.steps} == {1}
    assert {step.num_backwards for step in evidence.steps} == {3}
    assert {step.num_forwards for step in evidence.steps if step.arm in ARMS} == {3}
    assert 0 < typical_s(evidence, "optimizer") < typical_s(evidence, "rest")


def test_steps_the_script_marks_itself(tmp_path: Path) -> None:
    evidence = observe("explicit.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "flatout.step"
    assert (evidence.phase_s("rest") or 0.0) > 0.99 * (evidence.step_s or 0.0) > 0.0


def test_lightning_books_the_closure_where_it_belongs(tmp_path: Path) -> None:
    evidence = observe("lightning_module.py", save=tmp_path / "evidence.json").measured
    assert_measured(evidence, anchor="SGD.step")
    assert {step.num_forwards for step in evidence.steps if step.arm in ARMS} == {1}
    assert 0 < typical_s(evidence, "optimizer") < typical_s(evidence, "rest") / 2
    assert evidence.phase_s("forward") and evidence.phase_s("backward")
    assert evidence.loaders[0].place is not None
    assert evidence.loaders[0].place.line == line_of("lightning_module.py", "loader = DataLoader")
    assert (evidence.job.framework, made_by(evidence.loaders[0])) == ("lightning", None)
    (call,) = (call for call in evidence.module_calls if call.module == "Sequential")
    assert call.place.function == "Module.training_step"
