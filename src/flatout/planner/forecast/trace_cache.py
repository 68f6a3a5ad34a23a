"""Traces that outlive the command: a second question about the same job starts from them.

A trace follows from the job, the recipe, the sizes and the rules it was traced under, and from nothing else.
The key of a stored trace is a checksum of all of these (of the job, its `fingerprint`; of the rules, the text
of the rooms that make a trace), so that a file is either the answer or is not found; a folder that is deleted
costs time and nothing else.  One file per trace: numpy arrays and JSON, no pickle.  A file that is cut or
foreign is as good as absent.

A job is made by code: the user's (the module that builds it and whatever lies beside it) and that of the
packages it is built from.  It is made from settings, but not from what a plan varies itself: a batch size
does not make another model, or no plan could be made at all.  Files are compared by content.  What cannot be
read in a moment has no checksum, and then nothing is stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import platform
import sys
import sysconfig
import typing
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import flatout
from flatout.ground.atomic_files import replace_whole
from flatout.ground.codec import WrongShape, decode, encode
from flatout.ground.packages import cache_folder, installed_version
from flatout.memory.cuda.formulas import Formula
from flatout.memory.trace.record import Storage, Trace

PACKAGE = Path(flatout.__file__).parent
ROOMS = ("memory", "hardware")  # whose code makes a trace
FORMAT = 1
MOST_FILES = 400
EVENTS = "events"
HEADER = "header"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile, WrongShape)


def checksum_of_rules() -> str:
    """Hash every file that decides how a trace comes out, so that a changed rule drops old traces."""
    found = hashlib.sha256()
    for path in (path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))):
        found.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


class TraceCache:
    """Stored traces of one job, which `identity` is the checksum of."""

    def __init__(self, identity: str, *, folder: Path | None = None) -> None:
        self._identity = [identity, checksum_of_rules()]
        self._folder = folder or cache_folder() / "traces"

    def find(self, conditions: object) -> Trace | None:
        """Return the trace under these conditions; None if there is none that can be read."""
        try:
            with self._path(conditions).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                trace = _trace_of({name: arrays[name] for name in arrays.files})
        except UNREADABLE:
            return None
        return trace

    def keep(self, conditions: object, trace: Trace) -> None:
        """Store a trace, if the disk allows."""
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **_arrays_of(trace))
        with contextlib.suppress(OSError):
            replace_whole(self._path(conditions), content.getvalue())
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
    """Return storages by column: a table of values, and a number per storage."""
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


PACKAGES = ("torch", "transformers", "peft", "lightning", "pytorch-lightning", "bitsandbytes", "accelerate")
SUFFIXES = (".py", ".json", ".toml", ".yaml", ".yml")
MOST_ENTRIES, MOST_BYTES = 20_000, 32 << 20  # of folders that are looked through
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist"})


def fingerprint(
    model: str,
    *,
    settings: Mapping[str, object],
    varied: Collection[str] = (),
    configs: Iterable[Path] = (),
    options: Mapping[str, object] | None = None,
) -> str | None:
    """Return the checksum of a loaded job; None if it cannot be computed.

    `varied` are the keys of `settings` that a plan varies; `configs` are the files that `settings` come from;
    `options` are what else the job was loaded with.
    """
    files = _files(model, left_out={path.resolve() for path in configs})
    if files is None:
        return None
    parts = {
        "model": model,
        "settings": {key: value for key, value in settings.items() if key not in varied},
        "options": dict(options or {}),
        "files": files,
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
    }
    return _checksum(json.dumps(parts, sort_keys=True, default=str).encode())


def _files(model: str, *, left_out: Collection[Path]) -> dict[str, str] | None:
    """Return path -> checksum of every file the job may be made from; None if there are too many."""
    found: dict[str, str] = {}
    num_bytes = num_entries = 0
    for folder in sorted(_folders(model)):
        for parent, folders, names in os.walk(folder):
            folders[:] = sorted(name for name in folders if name not in SKIPPED and name[0] != ".")
            num_entries += len(folders) + len(names)
            if num_entries > MOST_ENTRIES:
                return None
            for path in (Path(parent, name) for name in sorted(names) if name.endswith(SUFFIXES)):
                if str(path) in found or path in left_out or not path.is_file():
                    continue
                num_bytes += path.stat().st_size
                if num_bytes > MOST_BYTES:
                    return None
                found[str(path)] = _checksum(path.read_bytes())
    return found


def _folders(model: str) -> set[Path]:
    """Return the config folder, and the folders of the user's own modules."""
    place = Path(model)
    named = {place if place.is_dir() else place.parent} if place.exists() else set()
    libraries = [Path(path).resolve() for path in sysconfig.get_paths().values()]
    libraries += [Path(sys.prefix).resolve(), Path(flatout.__file__).resolve().parent]
    for module in loaded_modules():
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        # torch.ops calls itself "_ops.py": a module without a file must not add the working folder.
        if path.is_file() and not any(path.is_relative_to(folder) for folder in libraries):
            named.add(path.parent)
    return {folder.resolve() for folder in named}


def loaded_modules() -> list[ModuleType]:
    return list(sys.modules.values())


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
