"""Every whole line of a log is read, whatever happened to its writer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from flatout.codec import encode
from flatout.errors import BadInput
from flatout.run_log import LogKind, RunLog, log_path, read_records

KIND = LogKind(format="flatout-test-log", version=2, what="a test")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    step: int
    loss: float | None = None


def test_records_come_back_in_the_order_of_their_lines(tmp_path: Path) -> None:
    lines = [Line(step=3, loss=0.5), Line(step=1), Line(step=3, loss=float("inf"))]
    with RunLog(tmp_path, KIND, settings={"seed": 1}, tensorboard=False) as log:
        for line in lines:
            log.add(encode(line), curves={"test": encode(line)}, step=line.step)
    with log_path(tmp_path).open("a") as file:
        file.write('{"step": 4')
    assert list(read_records(tmp_path, KIND, Line)) == [lines[0], lines[1], Line(step=3)]


def test_another_kind_of_log_is_refused(tmp_path: Path) -> None:
    RunLog(tmp_path, KIND, tensorboard=False).close()
    with pytest.raises(BadInput, match="no log of another thing"):
        list(read_records(tmp_path, LogKind(format="other", version=2, what="another thing"), Line))
    with pytest.raises(BadInput, match="has version 2, this Flatout reads 1"):
        list(read_records(tmp_path, LogKind(format=KIND.format, version=1, what="a test"), Line))


def test_curves_hold_the_numbers_alone(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with RunLog(tmp_path, KIND, tensorboard=True) as log:
        log.add({}, curves={"a": {"loss": 0.5, "name": "x", "none": None, "nan": float("nan")}}, step=7)
    events = loading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["a/loss"]
    assert [(event.step, event.value) for event in events.Scalars("a/loss")] == [(7, 0.5)]
