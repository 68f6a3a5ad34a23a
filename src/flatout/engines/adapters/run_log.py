"""What a run leaves behind while it goes on: a line per report, and curves for TensorBoard.

`log.jsonl` only ever grows: one JSON object per line, written at once.  A run that is killed in the middle of
a line leaves a torn one, which readers drop and the next writer cuts off.  A run that resumes does some steps
a second time; they stand twice in the file, and the later line counts.  What is not known is null.

The first line says what the file is: {"format": "flatout-adapters-log", "version": 1, "settings": {...}}.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from flatout.codec import WrongShape, decode, encode
from flatout.errors import BadInput, MissingExtra, import_extra

FORMAT, VERSION = "flatout-adapters-log", 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One report of a phase; None is not known."""

    phase: str
    step: int
    losses: dict[str, float | None] = field(default_factory=dict)  # by task, or by the router's losses
    learning_rates: dict[str, float | None] = field(default_factory=dict)
    # By task: scores on rows held out, in points, and their loss.
    validation: dict[str, dict[str, float | None]] = field(default_factory=dict)
    routing: dict[str, float | None] = field(default_factory=dict)  # accuracy and the like
    tokens_per_s: float | None = None
    steps_per_s: float | None = None
    elapsed_s: float | None = None  # of the phase, resumed parts included


class RunLog:
    """Writes `log.jsonl` in a folder and, where it is installed, TensorBoard's files beside it."""

    def __init__(
        self, folder: Path, *, settings: Mapping[str, Any] | None = None, tensorboard: bool | None = None
    ) -> None:
        """`tensorboard` None means where it is installed; True insists on it."""
        self.path = log_path(folder)
        self._board = _summary_writer(folder, tensorboard)
        folder.mkdir(parents=True, exist_ok=True)
        is_fresh = _cut_torn_line(self.path) == 0
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        if is_fresh:
            self._write({"format": FORMAT, "version": VERSION, "settings": encode(dict(settings or {}))})

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: StepRecord) -> None:
        """Add a report; it is in the file when this returns."""
        values = encode(record)
        self._write(values)
        if self._board is not None:
            for name, value in _scalars({k: v for k, v in values.items() if k not in ("phase", "step")}):
                self._board.add_scalar(f"{record.phase}/{name}", value, record.step)
            self._board.flush()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _write(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_known(values), allow_nan=False) + "\n")


def log_path(folder: Path) -> Path:
    """Where the log of a run in `folder` is."""
    return folder / "log.jsonl"


def read_log(folder: Path) -> list[StepRecord]:
    """The reports of a run by phase and step, each as it was made last."""
    path = log_path(folder)
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist", hint="name the folder of a run") from None
    lines = text.split("\n")[:-1]  # behind the last line end is nothing, or a torn line
    records: dict[tuple[str, int], StepRecord] = {}
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            if number == 1:
                _check_header(values, path)
            else:
                record = decode(StepRecord, values)
                records[record.phase, record.step] = record
        except (json.JSONDecodeError, WrongShape) as error:
            raise BadInput(f"{path}:{number} is damaged: {error}", hint="remove that line") from error
    return [records[key] for key in sorted(records)]


def _check_header(values: Any, path: Path) -> None:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise BadInput(f"{path} is no log of an adapters run", hint="name the folder of a run")
    if values.get("version") != VERSION:
        raise BadInput(
            f"{path} has version {values.get('version')}, this Flatout reads {VERSION}",
            hint="read it with the release that wrote it",
        )


def _cut_torn_line(path: Path) -> int:
    """Remove what a killed writer left behind the last line end; the bytes that stay."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return whole


def _known(value: Any) -> Any:
    """Plain JSON values with null for numbers that are none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _known(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_known(item) for item in value]
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def _scalars(values: Mapping[str, Any], place: str = "") -> list[tuple[str, float]]:
    """Every known number under the path of its keys."""
    found: list[tuple[str, float]] = []
    for key, value in values.items():
        name = f"{place}/{key}" if place else key
        if isinstance(value, Mapping):
            found += _scalars(value, name)
        elif _known(value) is not None:
            found.append((name, float(value)))
    return found


def _summary_writer(folder: Path, wanted: bool | None) -> Any:
    if wanted is False:
        return None
    try:
        import_extra("tensorboard", extra="plots")
    except MissingExtra:
        if wanted:
            raise
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=str(folder / "tensorboard"))
