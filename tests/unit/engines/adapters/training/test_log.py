"""Lines of a log survive kills and resumes; what is not known is null."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from flatout.engines.adapters.training.log import KIND, StepRecord
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
