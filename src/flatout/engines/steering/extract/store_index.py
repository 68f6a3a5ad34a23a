"""What a store's folder holds: shards that describe themselves, so that the folder is its own index.

A shard is one safetensors file: `keys` [rows, 32] (a digest of each text's tokens), one tensor `layer.N`
[rows, D] per layer, and in its metadata the space its rows belong to.  A file with its final name is whole,
because it was renamed when complete.  There is no index file that two processes would have to agree on: each
lists the folder and reads the headers of shards it has not seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.ground.errors import import_extra

VERSION = "1"
FORMAT = "flatout-activations"
SUFFIX = ".safetensors"
KEY_BYTES = 32
LAYER = re.compile(r"layer\.(\d+)")
NOWHERE = -1  # inside arrays of places only

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of a store."""

    path: Path
    space: str
    layers: frozenset[int]
    rows: dict[bytes, int]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlaces:
    """Where each wanted (text, layer) lies: the number of a shard and a row in it, or nowhere."""

    shards: tuple[Shard, ...]
    shard: Ints  # texts, layers
    row: Ints

    def complete(self) -> Ints:
        """Return the texts of which every layer was found."""
        return np.flatnonzero((self.shard != NOWHERE).all(axis=1))


class ShardIndex:
    """The shards of one folder, as far as they were seen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, Shard | None] = {}

    def refresh(self) -> None:
        """Read the headers of shards that appeared; forget those that are gone."""
        names = {path.name for path in self._folder.glob(f"*{SUFFIX}") if not path.name.startswith(".")}
        for gone in self._seen.keys() - names:
            del self._seen[gone]
        for name in sorted(names - self._seen.keys()):
            self._seen[name] = read_shard(self._folder / name)

    def shards(self, space: str | None = None) -> list[Shard]:
        """List the shards of a space, or all of them."""
        found = [shard for shard in self._seen.values() if shard is not None]
        return [shard for shard in found if space in (None, shard.space)]

    def find(self, space: str, *, keys: Sequence[bytes], layers: Sequence[int]) -> ShardPlaces:
        """Find where the wanted layers of the wanted texts lie."""
        shape = (len(keys), len(layers))
        shard_NL, row_NL = np.full(shape, NOWHERE), np.zeros(shape, dtype=np.int64)
        shards = tuple(self.shards(space))
        for number, shard in enumerate(shards):
            columns = np.flatnonzero([layer in shard.layers for layer in layers])
            rows = np.array([shard.rows.get(key, NOWHERE) for key in keys], dtype=np.int64)
            there = np.flatnonzero(rows != NOWHERE)
            if columns.size and there.size:
                shard_NL[np.ix_(there, columns)] = number
                row_NL[np.ix_(there, columns)] = rows[there, None]
        return ShardPlaces(shards=shards, shard=shard_NL, row=row_NL)


def read_shard(path: Path) -> Shard | None:
    """Read the header and keys of a shard; None for a file that is not one or cannot be read."""
    safetensors: Any = import_extra("safetensors", extra="steering")
    try:
        num_bytes = path.stat().st_size
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
                return None
            keys = file.get_tensor("keys").tobytes()
            layers = [match[1] for name in file.keys() if (match := LAYER.fullmatch(name))]  # noqa: SIM118
    except (OSError, safetensors.SafetensorError):  # gone since it was listed, cut, or no such file
        return None
    rows = {keys[i : i + KEY_BYTES]: i // KEY_BYTES for i in range(0, len(keys), KEY_BYTES)}
    return Shard(
        path=path,
        space=metadata["space"],
        layers=frozenset(map(int, layers)),
        rows=rows,
        num_bytes=num_bytes,
    )
