"""Traces that outlive the command: a second question about the same job starts from them.

A trace follows from the job, the recipe, the sizes and the rules it was traced under, and from nothing else.
The key of a stored trace is a checksum of all of these (of the job, see `fingerprint`; of the rules, the text
of the rooms that make a trace), so that a file is either the answer or is not found; a folder that is deleted
costs time and nothing else.  One file per trace: numpy arrays and JSON, no pickle.  A file that is cut or
foreign is as good as absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import typing
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import flatout
from flatout.codec import WrongShape, decode, encode
from flatout.memory.cuda.formulas import Formula
from flatout.memory.trace.record import Storage, Trace

CACHE_VARIABLE = "FLATOUT_CACHE"
PACKAGE = Path(flatout.__file__).parent
ROOMS = ("memory", "hardware")  # whose code makes a trace
FORMAT = 1
MOST_FILES = 400
EVENTS = "events"
HEADER = "header"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile, WrongShape)


def traces_folder() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    return (Path(named) if named else Path.home() / ".cache" / "flatout") / "traces"


def checksum_of_rules() -> str:
    """Of every file that decides how a trace comes out: a rule that changes leaves its traces behind."""
    found = hashlib.sha256()
    for path in (path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))):
        found.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


class TraceStore:
    """Stored traces of one job, which `identity` is the checksum of."""

    def __init__(self, identity: str, *, folder: Path | None = None) -> None:
        self._identity = [identity, checksum_of_rules()]
        self._folder = folder or traces_folder()
        self.num_found = 0

    def find(self, conditions: object) -> Trace | None:
        """The trace under these conditions; None where there is none that can be read."""
        try:
            with self._path(conditions).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                trace = _trace_of({name: arrays[name] for name in arrays.files})
        except UNREADABLE:
            return None
        self.num_found += 1
        return trace

    def keep(self, conditions: object, trace: Trace) -> None:
        """Store a trace; where that cannot be done, the next question takes longer."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".", suffix=".npz")
            try:
                with os.fdopen(handle, "wb") as file:
                    np.savez_compressed(file, allow_pickle=False, **_arrays_of(trace))
                os.replace(temporary, self._path(conditions))
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            self._drop_oldest()

    def _path(self, conditions: object) -> Path:
        text = json.dumps([FORMAT, self._identity, encode(conditions)], sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.npz"

    def _drop_oldest(self) -> None:
        files = list(self._folder.glob("[!.]*.npz"))
        if len(files) > MOST_FILES:
            for path in sorted(files, key=lambda path: path.stat().st_mtime)[: len(files) - MOST_FILES]:
                path.unlink(missing_ok=True)


def _arrays_of(trace: Trace) -> dict[str, np.ndarray[Any, Any]]:
    """Storages by column: each a table of its values and a number per storage."""
    arrays: dict[str, np.ndarray[Any, Any]] = {EVENTS: trace.events}
    header: dict[str, Any] = {"columns": {}}
    for field in dataclasses.fields(Storage):
        values = [getattr(storage, field.name) for storage in trace.storages]
        table = {value: number for number, value in enumerate(dict.fromkeys(values))}
        arrays[field.name] = np.fromiter((table[value] for value in values), np.int32, len(values))
        header["columns"][field.name] = encode(list(table))
    for field in dataclasses.fields(Trace):
        if field.name not in ("storages", EVENTS):
            header[field.name] = encode(getattr(trace, field.name))
    arrays[HEADER] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return arrays


def _trace_of(arrays: dict[str, np.ndarray[Any, Any]]) -> Trace:
    header = json.loads(arrays[HEADER].tobytes())
    columns = [
        _column(field.name, header["columns"][field.name], arrays[field.name])
        for field in dataclasses.fields(Storage)
    ]
    names = [field.name for field in dataclasses.fields(Storage)]
    storages = tuple(Storage(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True))
    hints = typing.get_type_hints(Trace)
    others = {
        field.name: decode(hints[field.name], header[field.name], field.name)
        for field in dataclasses.fields(Trace)
        if field.name not in ("storages", EVENTS, "marks")
    }
    marks = tuple((int(at), str(step), phase) for at, step, phase in header["marks"])
    return Trace(storages=storages, events=arrays[EVENTS].astype(np.int64), marks=marks, **others)


def _column(name: str, table: Sequence[Any], numbers: np.ndarray[Any, Any]) -> list[Any]:
    if name == "formula":
        table = [None if item is None else Formula(name=item[0], counts=tuple(item[1])) for item in table]
    return [table[number] for number in numbers.tolist()]
