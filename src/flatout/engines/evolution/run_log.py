"""What a run leaves behind while it goes on: a line per epoch, and curves for TensorBoard.

The log is a text file that only ever grows: one JSON object per line, written at once.  A run that is killed
in the middle of a line leaves a torn one, which readers drop and the next writer cuts off.  A run that
resumes from a checkpoint does some epochs a second time; they stand twice in the file, and the later one
counts.  What is not known is null: an epoch without an evaluation has no held-out reward, not 0.

The first line says what the file is: {"format": "flatout-evolution-log", "version": 1, "settings": {...}}.
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

FORMAT = "flatout-evolution-log"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRecord:
    """One epoch of a run; None is not known."""

    epoch: int
    reward_train: float | None = None  # mean over members and prompts
    reward_heldout: float | None = None  # of the model itself, unperturbed
    rewards_per_s: float | None = None
    tokens_per_s: float | None = None
    plain_share: float | None = None  # speed relative to plain inference of the same rows; 1.0 costs nothing
    failed_rows: int | None = None
    elapsed_s: float | None = None  # since the run began, resumed ones included
    statistics: dict[str, float | None] = field(default_factory=dict)  # of the update, by name


class RunLog:
    """Writes `log.jsonl` in a folder and, where it is asked for, TensorBoard's files beside it."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: Mapping[str, Any] | None = None,
        tensorboard: bool | None = None,
    ) -> None:
        """`tensorboard` None means where it is installed; True insists on it."""
        self.path = log_path(folder)
        writer = _summary_writer(folder, tensorboard)
        folder.mkdir(parents=True, exist_ok=True)
        is_fresh = _cut_torn_line(self.path) == 0
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._board = writer
        if is_fresh:
            self._write({"format": FORMAT, "version": VERSION, "settings": encode(dict(settings or {}))})

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: EpochRecord) -> None:
        """Add an epoch; it is in the file when this returns."""
        values = encode(record)
        self._write(values)
        if self._board is not None:
            for name, value in {**values, **values["statistics"]}.items():
                if name not in ("epoch", "statistics") and _known(value) is not None:
                    self._board.add_scalar(f"evolution/{name}", value, record.epoch)
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


def read_log(folder: Path) -> list[EpochRecord]:
    """The epochs of a run in their order, each as it was done last."""
    path = log_path(folder)
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist", hint="name the folder of a run") from None
    lines = text.split("\n")[:-1]  # behind the last line end is nothing, or a torn line
    records: dict[int, EpochRecord] = {}
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            if number == 1:
                _check_header(values, path)
            else:
                record = decode(EpochRecord, values)
                records[record.epoch] = record
        except (json.JSONDecodeError, WrongShape) as error:
            raise BadInput(f"{path}:{number} is damaged: {error}", hint="remove that line") from error
    return [records[epoch] for epoch in sorted(records)]


def _check_header(values: Any, path: Path) -> None:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise BadInput(f"{path} is no log of an evolution run")
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
