"""A table whose columns never change and whose unknown cells are empty."""

from __future__ import annotations

import csv
from pathlib import Path

from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample
from flatout.monitor.sinks.csv import Csv


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
