"""The log of a run: a text file that only grows, and TensorBoard curves beside it.

One JSON object per line, written at once.  A run that is killed in the middle of a line leaves a torn line,
which readers skip and the next writer cuts off.  The writer locks the file while it runs: two runs cannot
write one log, and a log without a lock belongs to a run that has ended.  A run that resumes repeats some
steps; they are in the file twice, and readers take the later one.  Unknown values are null.

The first line is a header: {"format": "flatout-evolution-log", "version": 1,
"settings": {...}}.  A run that resumes with other settings writes another header for the lines after it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from flatout.ground.atomic_files import append_whole, cut_torn_line, flush, open_to_append, try_lock
from flatout.ground.codec import WrongShape, decode, encode
from flatout.ground.errors import BadInput, MissingExtra
from flatout.ground.tensorboard_files import EventFile

WHEN_FULL = "free some space and continue with --resume"
HEADER = '{"format":'
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogKind(Generic[Record]):
    """What distinguishes one kind of log from another; `what` is its name in messages."""

    format: str
    version: int
    what: str
    record: type[Record]
    key: Callable[[Record], tuple[Any, ...]]  # orders records; its last part is the step of the curves
    curves: Callable[[Record], Mapping[str, Any]]  # numbers for TensorBoard, in tables by their names


class RunLog(Generic[Record]):
    """Writes `log.jsonl` in a folder and, on request, TensorBoard files next to it."""

    def __init__(
        self,
        folder: Path,
        kind: LogKind[Record],
        *,
        settings: Mapping[str, Any] | None = None,
        tensorboard: bool | None = None,
    ) -> None:
        """Write curves with `tensorboard`: None if it is installed; True requires it."""
        self.path = log_path(folder)
        self._kind = kind
        self._file = open_to_append(self.path)
        try:
            if try_lock(self._file) is False:
                raise BadInput(f"another run writes {self.path}", hint="wait for it, or choose another --out")
            cut_torn_line(self.path)
            said = {"format": kind.format, "version": kind.version}
            header = _known({**said, "settings": encode(dict(settings or {}))})
            if read_header(folder) != header:
                self._write(header)
            self._curves = _curves_in(folder / "tensorboard", tensorboard)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, record: Record) -> None:
        """Append a line, which is in the file on return, and the points of its curves.

        Names of nested curves are joined by a slash; other values than numbers are left out.
        """
        self._write(encode(record))
        if self._curves is not None:
            step = self._kind.key(record)[-1]
            self._curves.add(dict(_scalars(encode(self._kind.curves(record)))), step=step)

    def write_if_missing(self, record: Record) -> None:
        """Add the line of a record unless the file has it."""
        folder, key = self.path.parent, self._kind.key
        if all(key(known) != key(record) for known in read_records(folder, self._kind)):
            self.write(record)

    def flush(self) -> None:
        """Hand the lines to the disk: a checkpoint that is written next never knows more than the log."""
        flush(self.path)

    def close(self) -> None:
        self._file.close()
        if self._curves is not None:
            self._curves.close()

    def _write(self, values: Mapping[str, Any]) -> None:
        line = json.dumps(_known(values), allow_nan=False) + "\n"
        append_whole(self._file, line.encode(), when_full=WHEN_FULL)


def log_path(folder: Path) -> Path:
    """Return the path of the log in a run's folder."""
    return folder / "log.jsonl"


def is_written(folder: Path) -> bool | None:
    """Return whether a live run writes the log of a folder; None if that is unknown."""
    try:
        with log_path(folder).open("rb") as file:
            free = try_lock(file, shared=True)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    return None if free is None else not free


def is_abandoned(folder: Path, *, within_s: float = 10.0) -> bool:
    """Return whether no live run writes the log of a folder; wait `within_s` for a killed run to end."""
    deadline_s = time.monotonic() + within_s
    while (lives := is_written(folder)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return lives is False


def read_records(folder: Path, kind: LogKind[Record]) -> Iterator[Record]:
    """Yield the records of a log in the order of its lines; a resumed run repeats some steps."""
    for number, values in _read(folder, kind):
        if number > 1 and not (isinstance(values, dict) and "format" in values):
            try:
                yield decode(kind.record, values)
            except WrongShape as error:
                raise _damaged(folder, number, error) from error


def read_log(folder: Path, kind: LogKind[Record]) -> list[Record]:
    """Read the records of a log in the order of their steps, each as it was written last."""
    records = {kind.key(record): record for record in read_records(folder, kind)}
    return [records[key] for key in sorted(records)]


def read_header(folder: Path) -> dict[str, Any]:
    """Read the last header of a log of any kind: what it is, and the settings; {} without one."""
    try:
        with log_path(folder).open(encoding="utf-8", errors="replace") as file:
            lines = [line for number, line in enumerate(file) if number == 0 or line.startswith(HEADER)]
        header = json.loads(lines[-1] if lines else "{}")
    except (OSError, ValueError):
        return {}
    return header if isinstance(header, dict) else {}


def has_log(folder: Path, kind: LogKind[Any]) -> bool:
    """Return whether a run of this kind left a log in a folder, which it does before its first checkpoint."""
    return read_header(folder).get("format") == kind.format


def _read(folder: Path, kind: LogKind[Any]) -> Iterator[tuple[int, Any]]:
    """Yield every complete line of a log with its number; the first, the header, is checked."""
    path = log_path(folder)
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(f"{path} does not exist", hint="name the folder of a run") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    lines = text.split("\n")[:-1]  # after the last line end is nothing, or a torn line
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise _damaged(folder, number, error) from error
        if number == 1:
            _check_header(values, kind, path)
        yield number, values


def _damaged(folder: Path, number: int, error: Exception) -> BadInput:
    return BadInput(f"{log_path(folder)}:{number} is damaged: {error}", hint="remove that line")


def _check_header(values: Any, kind: LogKind[Any], path: Path) -> None:
    if not isinstance(values, dict) or values.get("format") != kind.format:
        raise BadInput(f"{path} is not a log of {kind.what}", hint="name the folder of a run")
    if values.get("version") != kind.version:
        raise BadInput(
            f"{path} has version {values.get('version')}, this Flatout reads {kind.version}",
            hint="read it with the release that wrote it",
        )


def _known(value: Any) -> Any:
    """Return plain JSON values, with null for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _known(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_known(item) for item in value]
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def _scalars(values: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, float]]:
    """Yield every known number under the path of its keys."""
    for key, value in values.items():
        name = f"{place}/{key}" if place else key
        if isinstance(value, Mapping):
            yield from _scalars(value, name)
        elif isinstance(value, (int, float)) and _known(value) is not None:
            yield name, float(value)


def _curves_in(folder: Path, wanted: bool | None) -> EventFile | None:
    if wanted is False:
        return None
    try:
        return EventFile(folder, when_full=WHEN_FULL)
    except MissingExtra:
        if wanted:
            raise
        return None
