"""Reports and checkpoints of a phase are read back as they were written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from flatout.engines.adapters.training.records import (
    BEST,
    KIND,
    TRAINING,
    BestSoFar,
    PhaseState,
    StepRecord,
    checkpoints_of,
)
from flatout.engines.run.log import RunLog, log_path, read_log
from flatout.ground.errors import BadInput


def record(step: int, *, phase: str = "phase1", loss: float = 1.0) -> StepRecord:
    return StepRecord(
        phase=phase, step=step, losses={"qa": loss}, validation={"qa": {"f1": 40.0, "loss": None}}
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with RunLog(tmp_path, KIND, settings={"seed": 1}) as log:
        log.write(record(10))
        log.write(record(5, phase="phase3"))
    assert read_log(tmp_path, KIND) == [record(10), record(5, phase="phase3")]
    assert json.loads(log_path(tmp_path).read_text().splitlines()[0])["settings"] == {"seed": 1}
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_torn_line_is_cut_and_a_repeated_step_counts_once(tmp_path: Path) -> None:
    with RunLog(tmp_path, KIND, tensorboard=False) as log:
        log.write(record(10))
    with log_path(tmp_path).open("a") as file:
        file.write('{"phase": "pha')
    assert read_log(tmp_path, KIND) == [record(10)]
    with RunLog(tmp_path, KIND, tensorboard=False) as log:
        log.write(record(10, loss=0.5))
    assert read_log(tmp_path, KIND) == [record(10, loss=0.5)]


def test_a_number_that_is_none_is_null(tmp_path: Path) -> None:
    with RunLog(tmp_path, KIND, tensorboard=False) as log:
        log.write(record(1, loss=math.nan))
    assert read_log(tmp_path, KIND)[0].losses == {"qa": None}


def test_damage_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        read_log(tmp_path, KIND)
    log_path(tmp_path).write_text('{"format": "other"}\n')
    with pytest.raises(BadInput, match="not a log of an adapters run"):
        read_log(tmp_path, KIND)
    log_path(tmp_path).write_text('{"format": "flatout-adapters-log", "version": 9}\n')
    with pytest.raises(BadInput, match="version 9"):
        read_log(tmp_path, KIND)
    log_path(tmp_path).write_text('{"format": "flatout-adapters-log", "version": 1}\n{"phase": 1}\n')
    with pytest.raises(BadInput, match=r"log\.jsonl:2 is damaged"):
        read_log(tmp_path, KIND)


def state(step: int = 3) -> PhaseState:
    return PhaseState(
        phase="phase1",
        step=step,
        steps=100,
        finished=False,
        config={"seed": 0},
        fingerprint="abc",
        threads=1,
        progress={"qa": BestSoFar(best_score=0.5, best_step=2, scores={"f1": 50.0})},
    )


def save(out: Path) -> Path:
    files = {TRAINING: {"w": torch.full((2,), 3.0)}, BEST: {"w": torch.zeros(2)}}
    return checkpoints_of(out, "phase1").save(3, state=state(), files=files)


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    assert save(tmp_path) == tmp_path / "phase1" / "step-000003"
    found = checkpoints_of(tmp_path, "phase1").latest()
    assert found is not None and found.state == state()
    assert found.tensors(TRAINING)["w"].tolist() == [3.0, 3.0]
    assert found.tensors(BEST)["w"].tolist() == [0.0, 0.0]
    assert sorted(path.name for path in found.path.iterdir()) == [
        "best.safetensors",
        "state.json",
        "training.safetensors",
    ]


def test_other_formats_and_later_versions_are_refused(tmp_path: Path) -> None:
    small = save(tmp_path) / "state.json"
    written = json.loads(small.read_text())
    assert written["format"] == "flatout-adapters-checkpoint" and "FORMAT" not in written
    small.write_text(json.dumps({**written, "version": 99}))
    with pytest.raises(BadInput, match="version 99"):
        checkpoints_of(tmp_path, "phase1").latest()
    small.write_text(json.dumps({**written, "format": "other"}))
    with pytest.raises(BadInput, match="is not a flatout-adapters-checkpoint but 'other'"):
        checkpoints_of(tmp_path, "phase1").latest()


def test_patience_counts_evaluations_without_a_better_one() -> None:
    progress, course = BestSoFar(), []
    for step, score in enumerate([50.0, 60.0, 60.0, 59.0], start=1):
        progress, is_best = progress.after(score=score, scores={"accuracy": score}, step=step, patience=2)
        course.append((is_best, progress.evaluations_without_better, progress.done))
    assert course == [(True, 0, None), (True, 0, None), (False, 1, None), (False, 2, 4)]
    assert (progress.best_score, progress.best_step, progress.scores) == (60.0, 2, {"accuracy": 60.0})


def test_without_patience_nothing_is_finished_early() -> None:
    progress = BestSoFar(best_score=1.0, best_step=1)
    for step in range(2, 50):
        progress, is_best = progress.after(score=0.5, scores={}, step=step, patience=None)
        assert not is_best and progress.done is None


def test_a_score_that_is_no_number_is_never_the_best() -> None:
    progress, is_best = BestSoFar().after(score=float("nan"), scores={}, step=1, patience=3)
    assert not is_best and progress.best_score is None and progress.evaluations_without_better == 1
    progress, is_best = progress.after(score=-5.0, scores={}, step=2, patience=3)
    assert is_best and progress.best_score == -5.0
