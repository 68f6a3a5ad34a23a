"""Where the time of a step is booked: by comparing phases, so nothing may run beside these jobs."""

from __future__ import annotations

from pathlib import Path

from tests.support.cli import ARMS, assert_measured, diagnose, line_of


def test_the_closure_of_lbfgs_is_not_optimizer_time(tmp_path: Path) -> None:
    evidence = diagnose("lbfgs.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "LBFGS.step"
    assert {step.num_batches for step in evidence.steps} == {1}
    assert {step.num_backwards for step in evidence.steps} == {3}
    assert {step.num_forwards for step in evidence.steps if step.arm in ARMS} == {3}
    rest_s, optimizer_s = evidence.phase_s("rest"), evidence.phase_s("optimizer")
    assert rest_s and optimizer_s
    assert optimizer_s < rest_s


def test_steps_the_script_marks_itself(tmp_path: Path) -> None:
    evidence = diagnose("explicit.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "flatout.step"
    assert (evidence.phase_s("rest") or 0.0) > 0.99 * (evidence.step_s or 0.0) > 0.0


def test_lightning_books_the_closure_where_it_belongs(tmp_path: Path) -> None:
    evidence = diagnose("lightning_module.py", save=tmp_path / "evidence.json").measured
    assert_measured(evidence, anchor="SGD.step")
    assert {step.num_forwards for step in evidence.steps if step.arm in ARMS} == {1}
    rest_s, optimizer_s = evidence.phase_s("rest"), evidence.phase_s("optimizer")
    assert rest_s and optimizer_s
    assert optimizer_s < rest_s / 2
    assert evidence.phase_s("forward") and evidence.phase_s("backward")
    assert evidence.loaders[0].place is not None
    assert evidence.loaders[0].place.line == line_of("lightning_module.py", "loader = DataLoader")
    (call,) = (call for call in evidence.module_calls if call.module == "Sequential")
    assert call.place.function == "Module.training_step"
