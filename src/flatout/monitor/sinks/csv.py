"""Samples as a table, one row each.

The columns are those of the first sample: every figure of the host and the job, and of the GPUs that were
there.  An unknown figure is an empty cell, never a zero.
"""

from __future__ import annotations

import csv
from pathlib import Path

from flatout.monitor.sample import Sample
from flatout.monitor.sinks.figures import figures


class Csv:
    """Writes a file anew."""

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
