"""Event files for TensorBoard, written at once and without torch.

TensorBoard's own writer has a thread, in which a full disk is a traceback that nobody catches; here the
caller gets the error.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.ground.atomic_files import append_whole, open_to_append
from flatout.ground.errors import MissingExtra

WHEN_FULL = "free some space or choose another folder"


class EventFile:
    """One event file in a folder; `suffix` ends its name."""

    def __init__(self, folder: Path, *, suffix: str = "", when_full: str = WHEN_FULL) -> None:
        self._events: Any = _part("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = _part("tensorboard.compat.proto.summary_pb2")
        records: Any = _part("tensorboard.summary.writer.record_writer")
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}{suffix}"
        self._when_full = when_full
        self._file = open_to_append(folder / name)
        self._records = records.RecordWriter(self)
        self._add(time.time(), file_version="brain.Event:2")

    def add(self, scalars: Mapping[str, float], *, step: int, time_s: float | None = None) -> None:
        """Add numbers by their tags at one step, at `time_s` or now."""
        values = [self._summaries.Summary.Value(tag=tag, simple_value=each) for tag, each in scalars.items()]
        at_s = time.time() if time_s is None else time_s
        self._add(at_s, step=step, summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def write(self, record: bytes) -> None:
        """Append a record: the record writer calls this."""
        append_whole(self._file, record, when_full=self._when_full)

    def _add(self, time_s: float, **content: Any) -> None:
        self._records.write(self._events.Event(wall_time=time_s, **content).SerializeToString())


def _part(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"the package {error.name!r} is not installed",
            hint="pip install tensorboard, which 'flatout[plots]' brings too",
        ) from error
