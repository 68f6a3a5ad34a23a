"""Ragged records on disk: a folder of .npy files, or one .safetensors file.

Both hold the same arrays: `fields/<name>` and, for each span, `spans/<number>.starts` and `.lengths`, and a
note which field has which span.  Both are mapped into memory when opened.  They are written under another
name and renamed, so that a file that is there is whole.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from flatout.data.rows.padding import Array, torch_dtype
from flatout.data.rows.row_gather import Span
from flatout.ground.errors import BadInput

FORMAT = "flatout-ragged"
VERSION = 1
NOTE = "ragged.json"
SUFFIX = ".safetensors"
CHUNK_BYTES = 1 << 26
SAFETENSORS_NAMES = {
    np.dtype(numpy_name): name
    for numpy_name, name in (
        ("bool", "BOOL"), ("uint8", "U8"), ("int8", "I8"), ("uint16", "U16"), ("int16", "I16"),
        ("uint32", "U32"), ("int32", "I32"), ("uint64", "U64"), ("int64", "I64"), ("float16", "F16"),
        ("float32", "F32"), ("float64", "F64"),
    )
}  # fmt: skip


def write(fields: Mapping[str, Array], spans: Mapping[str, Span], path: Path) -> None:
    """Write records to `path`, which must not exist."""
    if path.exists():
        raise BadInput(f"{path} exists", hint="remove it or choose another name")
    for name in fields:
        if not name or "/" in name or "\\" in name or name.startswith("."):
            raise BadInput(f"the field name {name!r} cannot be part of a file name")
    arrays: dict[str, Array] = {f"fields/{name}": flat for name, flat in fields.items()}
    numbers: dict[int, int] = {}
    for span in spans.values():
        number = numbers.setdefault(id(span), len(numbers))
        arrays |= {f"spans/{number}.starts": span.starts, f"spans/{number}.lengths": span.lengths}
    note = {
        "format": FORMAT,
        "version": VERSION,
        "spans": {name: numbers[id(span)] for name, span in spans.items()},
    }
    with _folder_beside(path) as folder:
        partial = folder / path.name
        if path.suffix == SUFFIX:
            _write_safetensors(arrays, note, partial)
        else:
            _write_folder(arrays, note, partial)
        partial.rename(path)


@contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """Yield a folder of this writer's own, which is gone when the block ends or fails."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        yield Path(folder)


def read(path: Path) -> tuple[dict[str, Array], dict[str, tuple[Array, Array]]]:
    """Map the fields and spans of `path` into memory."""
    if not path.exists():
        raise BadInput(f"{path} does not exist", hint="RaggedArrays.build writes it")
    arrays, note = _read_folder(path) if path.is_dir() else _read_safetensors(path)
    if note.get("format") != FORMAT or note.get("version") != VERSION:
        raise BadInput(
            f"{path} holds no ragged records of version {VERSION}", hint="RaggedArrays.build writes them"
        )
    fields = {
        name.removeprefix("fields/"): array for name, array in arrays.items() if name.startswith("fields/")
    }
    pairs = {
        number: (arrays[f"spans/{number}.starts"], arrays[f"spans/{number}.lengths"])
        for number in set(note["spans"].values())
    }
    return fields, {name: pairs[number] for name, number in note["spans"].items()}


def build(
    records: Iterable[Mapping[str, Any]], path: Path, *, ragged: Sequence[str], make: Callable[..., Any]
) -> None:
    """Append records to one raw file per field, then write them to `path` together."""
    with _folder_beside(path) as folder, ExitStack() as files:
        columns: dict[str, _Column] = {}
        count = -1
        for count, record in enumerate(records):
            if count == 0:
                for number, name in enumerate(record):
                    columns[name] = _Column(name, folder / str(number), files)
            if record.keys() != columns.keys():
                odd = next(iter(record.keys() ^ columns.keys()))
                raise BadInput(
                    f"record {count} {'lacks' if odd in columns else 'has'} field {odd!r}, unlike record 0",
                    hint="give every record the same fields",
                )
            for name, column in columns.items():
                column.append(record[name], count)
        if count < 0:
            raise BadInput("there are no records")
        fields, spans = {}, {}
        lengths_seen: list[tuple[Array, Array]] = []
        for name, column in columns.items():
            fields[name], lengths = column.finish(ragged=name in ragged)
            if lengths is None:
                continue
            pair = next((pair for pair in lengths_seen if np.array_equal(pair[1], lengths)), None)
            if pair is None:
                pair = (np.cumsum(lengths) - lengths, lengths)
                lengths_seen.append(pair)
            spans[name] = pair
        make(fields, spans=spans).save(path)


class _Column:
    """One field of the records being built."""

    def __init__(self, name: str, path: Path, files: ExitStack) -> None:
        self._name, self._path = name, path
        self._handle = files.enter_context(path.open("wb", buffering=1 << 20))
        self._lengths: list[int] = []
        self._first: Array | None = None
        self._rank = 0

    def append(self, value: Any, record: int) -> None:
        array: Array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        if self._first is None:
            if array.dtype.kind not in "biufc":
                raise BadInput(
                    f"field {self._name!r} of record {record} holds {array.dtype}, which is not a number"
                )
            self._first, self._rank = array, array.ndim
        first = self._first
        if array.dtype != first.dtype and array.size:
            raise BadInput(
                f"field {self._name!r} of record {record} has dtype {array.dtype}, of record 0 {first.dtype}"
            )
        if array.ndim != first.ndim or array.shape[1:] != first.shape[1:]:
            raise BadInput(
                f"field {self._name!r} of record {record} has shape {array.shape}, of record 0"
                f" {first.shape}: only the first axis may differ"
            )
        self._lengths.append(len(array) if array.ndim else 1)
        self._handle.write(np.ascontiguousarray(array).data if array.size else b"")

    def finish(self, *, ragged: bool) -> tuple[Array, Array | None]:
        """Return the flat array, mapped; and the rows of each record, None for a fixed field."""
        self._handle.close()
        assert self._first is not None
        lengths = np.array(self._lengths, dtype=np.int64)
        trailing = self._first.shape[1:]
        flat = _mapped(self._path, self._first.dtype, (int(lengths.sum()), *trailing), offset=0)
        if self._rank == 0:
            return flat, None
        if not ragged and lengths.min() == lengths.max() > 0:
            return flat.reshape(len(lengths), int(lengths[0]), *trailing), None
        return flat, lengths


def _mapped(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], *, offset: int) -> Array:
    """Map a part of a file as an array.  Copy on write: torch wants memory it could write to."""
    if not int(np.prod(shape)):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="c", offset=offset, shape=shape)


def _write_folder(arrays: Mapping[str, Array], note: Mapping[str, Any], folder: Path) -> None:
    for name, array in arrays.items():
        file = folder / f"{name}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, array, allow_pickle=False)
    (folder / NOTE).write_text(json.dumps(note), encoding="utf-8")


def _read_folder(folder: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise BadInput(
            f"{folder} holds no ragged records: {NOTE} cannot be read",
            hint="RaggedArrays.build makes such a folder",
        ) from error
    arrays = {}
    for file in sorted(folder.rglob("*.npy")):
        name = file.relative_to(folder).with_suffix("").as_posix()
        arrays[name] = np.load(file, mmap_mode="c", allow_pickle=False)
    return arrays, note


def _write_safetensors(arrays: Mapping[str, Array], note: Mapping[str, Any], file: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {FORMAT: json.dumps(note)}}
    end = 0
    # widest first: every array then begins at a multiple of its own width
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    for name, array in ordered:
        torch_dtype(array.dtype, name)
        if array.dtype not in SAFETENSORS_NAMES:
            raise BadInput(f"{name!r}: safetensors has no {array.dtype}")
        header[name] = {
            "dtype": SAFETENSORS_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            _write_rows(array, handle)


def _write_rows(array: Array, handle: IO[bytes]) -> None:
    """Write in chunks: a mapped array may be larger than memory."""
    rows = max(1, CHUNK_BYTES // max(1, array.nbytes // max(1, len(array))))
    for first in range(0, len(array), rows):
        handle.write(np.ascontiguousarray(array[first : first + rows]).tobytes())


def _read_safetensors(file: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    dtypes = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
    try:
        with file.open("rb") as handle:
            num_bytes = int.from_bytes(handle.read(8), "little")
            if num_bytes > file.stat().st_size:
                raise BadInput(
                    f"{file} is cut short, or not a safetensors file", hint="copy or build it again"
                )
            header = json.loads(handle.read(num_bytes))
        note = json.loads(header.pop("__metadata__")[FORMAT])
        arrays = {
            name: _mapped(
                file,
                dtypes[entry["dtype"]],
                tuple(entry["shape"]),
                offset=8 + num_bytes + entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise BadInput(f"{file} holds no ragged records: {error}") from error
    return arrays, note
