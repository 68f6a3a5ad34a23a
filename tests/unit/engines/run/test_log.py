"""Every whole line of a log is read, whatever happened to its writer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.run.log import (
    LogKind,
    RunLog,
    has_log,
    is_abandoned,
    is_written,
    log_path,
    read_header,
    read_log,
    read_records,
)
from flatout.ground.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    step: int
    loss: float | None = None
    said: dict[str, Any] = field(default_factory=dict)


KIND = LogKind(
    format="flatout-test-log",
    version=2,
    what="a test",
    record=Line,
    key=lambda line: (line.step,),
    curves=lambda line: {"a": {"loss": line.loss, **line.said}},
)


def test_records_come_back_in_the_order_of_their_lines(tmp_path: Path) -> None:
    lines = [Line(step=3, loss=0.5), Line(step=1), Line(step=3, loss=float("inf"))]
    with RunLog(tmp_path, KIND, settings={"seed": 1}, tensorboard=False) as log:
        for line in lines:
            log.write(line)
    with log_path(tmp_path).open("a") as file:
        file.write('{"step": 4')
    assert list(read_records(tmp_path, KIND)) == [lines[0], lines[1], Line(step=3)]
    assert read_log(tmp_path, KIND) == [
        lines[1],
        Line(step=3),
    ]  # of a step done twice the later counts
    assert read_header(tmp_path)["settings"] == {"seed": 1}
    assert read_header(tmp_path / "absent") == {}
    assert has_log(tmp_path, KIND) and not has_log(tmp_path, dataclasses.replace(KIND, format="other"))


def test_a_record_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    with RunLog(tmp_path, KIND, tensorboard=False) as log:
        log.write(Line(step=1, loss=0.5))
        log.write_if_missing(Line(step=1))
        log.write_if_missing(Line(step=2))
        log.flush()
    assert list(read_records(tmp_path, KIND)) == [Line(step=1, loss=0.5), Line(step=2)]


def test_settings_that_changed_are_written_where_they_begin_to_count(tmp_path: Path) -> None:
    for step, seed in enumerate([1, 1, 2]):
        with RunLog(tmp_path, KIND, settings={"seed": seed, "sizes": (1, 2)}, tensorboard=False) as log:
            log.write(Line(step=step))
    lines = [json.loads(line) for line in log_path(tmp_path).read_text().splitlines()]
    assert [line.get("settings", {}).get("seed") or line["step"] for line in lines] == [1, 0, 1, 2, 2]
    assert [record.step for record in read_log(tmp_path, KIND)] == [0, 1, 2]
    assert read_header(tmp_path)["settings"]["seed"] == 2
    assert has_log(tmp_path, KIND)


def test_another_kind_of_log_is_refused(tmp_path: Path) -> None:
    RunLog(tmp_path, KIND, tensorboard=False).close()
    with pytest.raises(BadInput, match="not a log of another thing"):
        list(read_records(tmp_path, dataclasses.replace(KIND, format="other", what="another thing")))
    with pytest.raises(BadInput, match="has version 2, this Flatout reads 1"):
        list(read_records(tmp_path, dataclasses.replace(KIND, version=1)))


def test_curves_hold_the_numbers_alone(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with RunLog(tmp_path, KIND, tensorboard=True) as log:
        log.write(Line(step=7, loss=0.5, said={"name": "x", "none": None, "nan": float("nan")}))
    events = loading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["a/loss"]
    assert [(event.step, event.value) for event in events.Scalars("a/loss")] == [(7, 0.5)]


@contextlib.contextmanager
def no_file_above(limit_bytes: int) -> Iterator[None]:
    """The system's own refusal to write more, without a disk to fill."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_line_that_finds_no_room_is_taken_back_and_its_file_named(tmp_path: Path) -> None:
    with RunLog(tmp_path, KIND, tensorboard=False) as log:
        log.write(Line(step=1))
        with (
            no_file_above(200),
            pytest.raises(BadInput, match=r"log\.jsonl cannot be written: File too .*--resume"),
        ):
            log.write(Line(step=2, said={"note": "x" * 400}))
    assert list(read_records(tmp_path, KIND)) == [Line(step=1)]
    assert log_path(tmp_path).read_bytes().endswith(b"\n")


def test_curves_that_find_no_room_end_with_the_file_they_are_in(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    curves = {f"curve-{number}": 0.5 for number in range(100)}
    with (
        RunLog(tmp_path, dataclasses.replace(KIND, curves=lambda line: curves), tensorboard=True) as log,
        no_file_above(1000),
        pytest.raises(BadInput, match=r"tfevents.* cannot be written: File too large"),
    ):
        log.write(Line(step=1))


WRITER = """
import sys
from pathlib import Path
from flatout.engines.run.log import LogKind, RunLog
kind = LogKind(format="f", version=1, what="w", record=dict, key=tuple, curves=dict)
with RunLog(Path(sys.argv[1]), kind, tensorboard=False):
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_a_log_is_written_by_one_run_and_a_killed_one_lets_go_of_it(tmp_path: Path) -> None:
    assert is_written(tmp_path) is False and is_abandoned(tmp_path)
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        assert is_written(tmp_path) is True
        assert not is_abandoned(tmp_path, within_s=0.0)
        with pytest.raises(BadInput, match=r"another run writes .*log\.jsonl"):
            RunLog(tmp_path, KIND, tensorboard=False)
        writer.kill()
    assert is_written(tmp_path) is False
    RunLog(tmp_path, KIND, tensorboard=False).close()
