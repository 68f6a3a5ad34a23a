"""Samples in files: JSON lines, a CSV table, TensorBoard scalars."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TextIO

from flatout.ground.tensorboard_files import EventFile
from flatout.monitor.sample import Sample
from flatout.monitor.sinks.figures import figures


class JsonLines:
    """Appends whole documents to a file or a stream; a reader sees each line as soon as it is whole."""

    def __init__(self, target: Path | TextIO) -> None:
        self._owned = target.open("a", encoding="utf-8") if isinstance(target, Path) else None
        self._stream: TextIO = self._owned or target  # type: ignore[assignment]

    def __call__(self, sample: Sample) -> None:
        self._stream.write(json.dumps(sample.to_json(), separators=(",", ":")) + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()


class Csv:
    """Writes a table, a row per sample.

    Its columns are the figures of the host, the job and the GPUs of the first sample; an unknown figure is an
    empty cell, never a zero.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._table: csv.DictWriter[str] | None = None

    def __call__(self, sample: Sample) -> None:
        row = {"time_s": sample.time_s, **{figure.path: figure.value for figure in figures(sample)}}
        if self._table is None:
            self._table = csv.DictWriter(self._file, list(row), extrasaction="ignore")
            self._table.writeheader()
        self._table.writerow(row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes an event file into a folder.

    The axis is the job's step if it has one, else whole seconds since the first sample.
    """

    def __init__(self, folder: Path) -> None:
        self._file = EventFile(folder, suffix=".flatout")
        self._first_s: float | None = None

    def __call__(self, sample: Sample) -> None:
        if self._first_s is None:
            self._first_s = sample.time_s
        steps = None if sample.job is None else sample.job.steps
        step = int(sample.time_s - self._first_s) if steps is None else steps
        known = {f"flatout/{each.path}": each.value for each in figures(sample) if each.value is not None}
        self._file.add(known, step=step, time_s=sample.time_s)

    def close(self) -> None:
        self._file.close()
