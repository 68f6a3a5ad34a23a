"""Event files that TensorBoard's own reader reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flatout.errors import MissingExtra
from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample
from flatout.monitor.sinks.tensorboard import TensorBoard


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
