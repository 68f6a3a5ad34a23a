"""Files of samples: lines that are whole, a table with fixed columns, events that TensorBoard reads."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from flatout.ground.errors import MissingExtra
from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample
from flatout.monitor.sinks.files import Csv, JsonLines, TensorBoard


def test_every_line_is_a_sample(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    sink = JsonLines(path)
    samples = [Sample(time_s=float(n), gpus=(GpuSample(index=n),)) for n in range(3)]
    for number, sample in enumerate(samples):
        sink(sample)
        assert len(path.read_text().splitlines()) == number + 1
    sink.close()
    assert [Sample.from_json(json.loads(line)) for line in path.read_text().splitlines()] == samples


def test_a_stream_is_written_and_left_open() -> None:
    stream = io.StringIO()
    sink = JsonLines(stream)
    sink(Sample(time_s=1.0))
    sink.close()
    assert json.loads(stream.getvalue())["format"] == "flatout-sample"


# A table whose columns never change and whose unknown cells are empty


def test_rows_have_the_columns_of_the_first_sample(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    sink = Csv(path)
    sink(Sample(time_s=1.0, gpus=(GpuSample(index=0, power_w=0.0),)))
    late = GpuSample(index=1, power_w=9.0)
    sink(
        Sample(
            time_s=2.0,
            gpus=(GpuSample(index=0), late),
            host=HostSample(cpu_share=0.5),
            job=JobSample(pid=1, loss=0.25),
        )
    )
    sink.close()
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first.keys() == second.keys()
    assert (first["gpu/0/power_w"], first["host/cpu_share"], first["job/loss"]) == ("0.0", "", "")
    assert (second["gpu/0/power_w"], second["host/cpu_share"], second["job/loss"]) == ("", "0.5", "0.25")
    assert "gpu/1/power_w" not in first


# Event files that TensorBoard's own reader reads


def test_scalars_are_read_back_at_the_jobs_steps(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    sink = TensorBoard(tmp_path)
    for number in range(3):
        gpu = GpuSample(index=0, power_w=100.0 + number)
        sink(Sample(time_s=1e9 + number, gpus=(gpu,), job=JobSample(pid=1, steps=10 * number)))
    sink.close()
    (path,) = tmp_path.iterdir()
    found = [
        (event.step, value.tag, value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value)
        for event in loader.EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]
    powers = [(step, figure) for step, tag, figure in found if tag == "flatout/gpu/0/power_w"]
    assert powers == [(0, 100.0), (10, 101.0), (20, 102.0)]
    assert not [tag for _, tag, _ in found if tag == "flatout/gpu/0/temperature_c"]  # unknown is absent


def test_without_a_job_the_axis_is_seconds(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    sink = TensorBoard(tmp_path)
    for second in (0.0, 2.0):
        sink(Sample(time_s=1e9 + second, host=HostSample(cpu_share=0.5)))
    sink.close()
    (path,) = tmp_path.iterdir()
    steps = {event.step for event in loader.EventFileLoader(str(path)).Load() if event.summary.value}
    assert steps == {0, 2}


def test_an_absent_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtra, match="pip install tensorboard"):
        TensorBoard(tmp_path)
