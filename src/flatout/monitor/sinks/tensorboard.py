"""Samples as TensorBoard scalars, beside those of the job; written without torch.

The step axis is the job's step where it has one, else whole seconds since the first sample.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from flatout.errors import MissingExtra
from flatout.monitor.sample import Sample
from flatout.monitor.sinks.figures import figures

PREFIX = "flatout"


class TensorBoard:
    """Writes an event file into a folder."""

    def __init__(self, folder: Path) -> None:
        self._events = _part("tensorboard.compat.proto.event_pb2")
        self._summaries = _part("tensorboard.compat.proto.summary_pb2")
        writer = _part("tensorboard.summary.writer.event_file_writer")
        self._writer: Any = writer.EventFileWriter(str(folder), filename_suffix=".flatout")
        self._first_s: float | None = None

    def __call__(self, sample: Sample) -> None:
        if self._first_s is None:
            self._first_s = sample.time_s
        steps = None if sample.job is None else sample.job.steps
        step = int(sample.time_s - self._first_s) if steps is None else steps
        values = [
            self._summaries.Summary.Value(tag=f"{PREFIX}/{figure.path}", simple_value=figure.value)
            for figure in figures(sample)
            if figure.value is not None
        ]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=sample.time_s, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


def _part(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"the package {error.name!r} is not installed", hint="pip install tensorboard"
        ) from error
