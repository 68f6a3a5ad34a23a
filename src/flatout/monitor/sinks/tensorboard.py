"""Samples as TensorBoard scalars, beside those of the job; written without torch.

The step axis is the job's step where it has one, else whole seconds since the first sample.
"""

from __future__ import annotations

from pathlib import Path

from flatout.monitor.sample import Sample
from flatout.monitor.sinks.figures import figures
from flatout.tensorboard_files import EventFile

PREFIX = "flatout"


class TensorBoard:
    """Writes an event file into a folder."""

    def __init__(self, folder: Path) -> None:
        self._file = EventFile(folder, suffix=".flatout")
        self._first_s: float | None = None

    def __call__(self, sample: Sample) -> None:
        if self._first_s is None:
            self._first_s = sample.time_s
        steps = None if sample.job is None else sample.job.steps
        step = int(sample.time_s - self._first_s) if steps is None else steps
        known = {f"{PREFIX}/{each.path}": each.value for each in figures(sample) if each.value is not None}
        self._file.add(known, step=step, time_s=sample.time_s)

    def close(self) -> None:
        self._file.close()
