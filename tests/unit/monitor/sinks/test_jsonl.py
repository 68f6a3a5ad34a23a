"""Lines that can be read as soon as they are written."""

from __future__ import annotations

import io
import json
from pathlib import Path

from flatout.monitor.sample import GpuSample, Sample
from flatout.monitor.sinks.jsonl import JsonLines


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
