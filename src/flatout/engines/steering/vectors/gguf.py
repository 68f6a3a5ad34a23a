"""Control vectors as GGUF files: what repeng exports and llama.cpp's --control-vector reads.

A GGUF file is a header, a list of typed key-value pairs, a list of tensors, and their bytes, aligned.  A
control vector holds one fp32 tensor `direction.N` per layer.  Only that is read and written here; quantised
tensors and other architectures are refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.ground.atomic_files import remove_leftovers, write_whole
from flatout.ground.errors import BadInput
from flatout.ground.units import round_up

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
ARCHITECTURE = "controlvector"
PREFIX = "direction."
LAYER = re.compile("[0-9]{1,6}")

UINT32, STRING, ARRAY = 4, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TYPES = {0: torch.float32, 1: torch.float16}  # of tensors; the others are quantised


def write_control_vector(path: Path, directions: Mapping[int, Tensor], *, model: str) -> None:
    """Write directions by layer; `model` is the kind of model that the file names."""
    pairs = [
        ("general.architecture", STRING, _string(ARCHITECTURE)),
        (f"{ARCHITECTURE}.model_hint", STRING, _string(model)),
        (f"{ARCHITECTURE}.layer_count", UINT32, struct.pack("<I", len(directions))),
    ]
    head = MAGIC + struct.pack("<IQQ", VERSION, len(directions), len(pairs))
    head += b"".join(_string(name) + struct.pack("<I", kind) + value for name, kind, value in pairs)
    data = b""
    for layer, direction in directions.items():
        head += _string(f"{PREFIX}{layer}") + struct.pack("<IQIQ", 1, direction.numel(), 0, len(data))
        data += _aligned(direction.detach().float().cpu().numpy().astype("<f4").tobytes())
    remove_leftovers(path.parent, of=path.name)
    write_whole(path, _aligned(head) + data)


def read_control_vector(path: Path) -> tuple[dict[int, Tensor], str | None]:
    """Read directions by layer, and the kind of model that the file names."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    try:
        return _read(_Cursor(content), path)
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise BadInput(f"{path} is cut or damaged: {error}", hint="copy or export it again") from error


def _read(cursor: _Cursor, path: Path) -> tuple[dict[int, Tensor], str | None]:
    if cursor.take("4s") != MAGIC:
        raise BadInput(f"{path} is not a GGUF file", hint="give a control vector")
    if (version := cursor.take("I")) not in (2, VERSION):
        raise BadInput(f"{path} is GGUF version {version}; flatout reads 2 and 3")
    num_tensors, num_pairs = cursor.take("Q"), cursor.take("Q")
    pairs = {}
    for _ in range(num_pairs):
        name = cursor.string()
        pairs[name] = cursor.value(cursor.take("I"))
    if pairs.get("general.architecture") != ARCHITECTURE:
        raise BadInput(
            f"{path} is a {pairs.get('general.architecture')}, not a {ARCHITECTURE}",
            hint="give a control vector, not a model",
        )
    listed = [
        (cursor.string(), cursor.shape(), cursor.take("I"), cursor.take("Q")) for _ in range(num_tensors)
    ]
    alignment = pairs.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise BadInput(f"{path} is cut or damaged: its tensors are aligned to {str(alignment)[:60]!r}")
    start = round_up(cursor.at, alignment)
    directions = {}
    for name, shape, kind, offset in listed:
        layer = name.removeprefix(PREFIX)
        if len(shape) != 1 or not shape[0] or kind not in TYPES or not LAYER.fullmatch(layer):
            raise BadInput(f"{path}: tensor {name!r} of shape {shape} is not a plain direction of a layer")
        cursor.at = start + offset
        values = cursor.take(f"{shape[0] * TYPES[kind].itemsize}s")
        directions[int(layer)] = torch.frombuffer(bytearray(values), dtype=TYPES[kind]).float()
    return dict(sorted(directions.items())), pairs.get(f"{ARCHITECTURE}.model_hint")


class _Cursor:
    """Reads little-endian values one after another; struct.error where they pass the end."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.content, self.at)
        self.at += struct.calcsize(f"<{form}")
        return value

    def string(self) -> str:
        text: bytes = self.take(f"{self._count(self.take('Q'))}s")
        return text.decode()

    def shape(self) -> list[int]:
        count = self.take("I")
        if count > 4:
            raise struct.error(f"a tensor of {count} dimensions")
        return [self.take("Q") for _ in range(count)]

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.take("I"), self._count(self.take("Q"))
            if inner == ARRAY:
                raise struct.error("an array of arrays")
            return [self.value(inner) for _ in range(count)]
        if kind not in SCALARS:
            raise struct.error(f"a value of unknown type {kind}")
        return self.take(SCALARS[kind])

    def _count(self, count: int) -> int:
        """Refuse a count beyond the end at once: a damaged file must cost no time and no memory."""
        if count > len(self.content) - self.at:
            raise struct.error(f"{count} values reach beyond the end")
        return count


def _string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _aligned(content: bytes) -> bytes:
    return content + bytes(-len(content) % ALIGNMENT)
