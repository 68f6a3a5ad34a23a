"""Activations on disk, found again by what they were computed from.

    store = ActivationStore("activations", tiers=[Tier(device="cpu", budget_bytes=4 << 30)])
    extract(model, tokenizer, texts, store=store)     # computes what the store lacks

A row's key is its content: an origin (weights, tokenizer, position, type), a digest of the text's tokens, and
a layer.  Nothing that changes a value can be forgotten, so a hit is never stale.

A shard is written whole or not at all (`atomic_files`).  Two processes need no lock: shards have names of
their own, and equal keys mean equal values, so that a row written twice does no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.engines.run.tensor_files import tensor_bytes
from flatout.engines.steering.extract.store_index import FORMAT, KEY_BYTES, SUFFIX, VERSION, Shard, ShardIndex
from flatout.engines.steering.extract.tiers import Tier, Tiers
from flatout.ground.atomic_files import remove_leftovers, write_whole
from flatout.ground.decisions import Decision, Source
from flatout.ground.errors import BadInput, import_extra
from flatout.ground.runs import make_folder
from flatout.ground.units import show_bytes, show_seconds

MOST_OPEN = 64
# Of a plain local disk, where nothing was measured: what a SATA SSD sustains.
ASSUMED_BYTES_PER_S = 500e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What rows depend on in addition to their text and layer."""

    weights: str
    tokenizer: str
    position: str
    dtype: str

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.said(), sort_keys=True).encode()).hexdigest()

    def said(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in ("weights", "tokenizer", "position", "dtype")}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRows:
    """Texts of which every wanted layer is stored: their places in the request, and values [found, L, D]."""

    places: tuple[int, ...]
    values: Tensor


class ActivationStore:
    """Activations in a folder, with memory tiers above it.

    `budget_bytes` bounds the folder: beyond it the shards unused for longest are removed.
    """

    def __init__(
        self, folder: Path | str, *, tiers: Sequence[Tier] = (), budget_bytes: int | None = None
    ) -> None:
        self.folder = Path(folder)
        try:
            make_folder(self.folder)
        except OSError as error:
            raise BadInput(f"{self.folder} cannot be a store: {error.strerror}") from error
        self.tiers = Tiers(tiers)
        self.budget_bytes = budget_bytes
        self.index = ShardIndex(self.folder)
        self._written = _Rate()
        self._read = _Rate()
        self._open: dict[str, Any] = {}  # shards by name, the last used last
        remove_leftovers(self.folder)

    def put(self, origin: Origin, *, keys: Sequence[bytes], layers: Sequence[int], values: Tensor) -> Path:
        """Write values [texts, layers, D] as one shard; on return it survives a loss of power."""
        wrong = [key for key in keys if len(key) != KEY_BYTES]
        if wrong or values.ndim != 3 or values.shape[:2] != (len(keys), len(layers)):
            raise BadInput(
                f"values are {tuple(values.shape)} for {len(keys)} keys of {KEY_BYTES} bytes"
                f" and {len(layers)} layers"
            )
        began = time.perf_counter()
        tensors = {f"layer.{layer}": values[:, at] for at, layer in enumerate(layers)}
        tensors["keys"] = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, KEY_BYTES)
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "space": origin.key,
            "content": json.dumps(origin.said()),
        }
        content = tensor_bytes(tensors, extra="steering", metadata=metadata)
        final = self.folder / f"{origin.key[:16]}-{uuid.uuid4().hex}{SUFFIX}"
        write_whole(final, content)
        self._written.add(len(content), time.perf_counter() - began)
        self._keep_budget(final)
        return final

    def read(
        self, origin: Origin, *, keys: Sequence[bytes], layers: Sequence[int], device: str = "cpu"
    ) -> StoredRows:
        """Return what is stored of the wanted texts; a text that lacks a layer counts as missing."""
        self.index.refresh()
        places = self.index.find(origin.key, keys=keys, layers=layers)
        complete = places.complete()
        shard_FL, row_FL = places.shard[complete], places.row[complete]
        values_LFD: Tensor | None = None
        for number in np.unique(shard_FL).tolist():
            shard = places.shards[number]
            for column, layer in enumerate(layers):
                at = np.flatnonzero(shard_FL[:, column] == number)
                if not at.size:
                    continue
                try:
                    block = self.tiers.fetch((shard.path.name, layer), lambda: self._load(shard, layer))  # noqa: B023
                except FileNotFoundError:  # another process removed it for its budget since it was listed
                    self.tiers.drop((shard.path.name, layer))
                    return self.read(origin, keys=keys, layers=layers, device=device)
                began = time.perf_counter()
                wanted = torch.from_numpy(row_FL[at, column]).to(block.device)
                if values_LFD is None:
                    shape = (len(layers), len(complete), block.shape[-1])
                    values_LFD = torch.empty(shape, dtype=block.dtype, device=device)
                if at.size == len(complete) and block.device == values_LFD.device:
                    torch.index_select(block, 0, wanted, out=values_LFD[column])
                else:
                    values_LFD[column, torch.from_numpy(at)] = block[wanted].to(device)
                self._read.add(at.size * block[0].nbytes, time.perf_counter() - began)
            with contextlib.suppress(OSError):
                os.utime(shard.path)  # used: the last to go when the budget is short
        if values_LFD is None:
            values_LFD = torch.empty(len(layers), 0, 0)
        return StoredRows(places=tuple(complete.tolist()), values=values_LFD.transpose(0, 1))

    @property
    def written_s(self) -> float:
        """Seconds that went into writing, so far."""
        return self._written.seconds

    def storing_pays(self, *, num_bytes: int, recompute_s: float, uses: int) -> Decision[bool]:
        """Decide whether storing beats recomputing here, by the rates this store has shown so far."""
        return storing_pays(
            num_bytes=num_bytes,
            recompute_s=recompute_s,
            uses=uses,
            write_bytes_per_s=self._written.per_s,
            read_bytes_per_s=self._read.per_s,
        )

    def _load(self, shard: Shard, layer: int) -> Tensor:
        """Map one layer of a shard; the file stays open, since the next layer is wanted next."""
        file = self._open.pop(shard.path.name, None)
        if file is None:
            safetensors: Any = import_extra("safetensors", extra="steering")
            file = safetensors.safe_open(shard.path, framework="pt")
        self._open[shard.path.name] = file
        if len(self._open) > MOST_OPEN:
            self._open.pop(next(iter(self._open)))
        block: Tensor = file.get_tensor(f"layer.{layer}")
        return block

    def _keep_budget(self, written: Path) -> None:
        if self.budget_bytes is None:
            return
        ages: list[tuple[float, int, Path]] = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                ages.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in ages)
        for _, size, path in sorted(ages):
            if total <= self.budget_bytes:
                return
            if path != written:
                path.unlink(missing_ok=True)  # a reader that has it mapped keeps it until it lets go
                total -= size


class _Rate:
    """Measures bytes per second over all that was moved; None before anything was."""

    def __init__(self) -> None:
        self._bytes, self.seconds = 0, 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self._bytes, self.seconds = self._bytes + num_bytes, self.seconds + seconds

    @property
    def per_s(self) -> float | None:
        return self._bytes / self.seconds if self._bytes and self.seconds else None


def storing_pays(
    *,
    num_bytes: int,
    recompute_s: float,
    uses: int,
    write_bytes_per_s: float | None = None,
    read_bytes_per_s: float | None = None,
) -> Decision[bool]:
    """Decide whether to store activations that are used `uses` times again.

    Storing costs one write and a read for every use; recomputing costs a pass for every use after the first,
    which has to be computed either way.  Last-token activations are small (2000 texts of a model with 32
    layers of width 4096 are 0.5 GB in bf16) and cost a pass over long texts: they pay at once.  Whole
    sequences are hundreds of times larger for the same pass, and often do not pay at all.
    """
    if num_bytes < 0 or recompute_s < 0 or uses < 0:
        raise BadInput(
            f"num_bytes={num_bytes}, recompute_s={recompute_s} and uses={uses} must not be negative"
        )
    measured = write_bytes_per_s is not None and read_bytes_per_s is not None
    source: Source = "measured" if measured else "assumed"
    write_s = num_bytes / (write_bytes_per_s or ASSUMED_BYTES_PER_S)
    read_s = num_bytes / (read_bytes_per_s or ASSUMED_BYTES_PER_S)
    costs = (
        f"{show_bytes(num_bytes)} take {show_seconds(write_s)} to write and {show_seconds(read_s)} to read,"
        f" computing them takes {show_seconds(recompute_s)}"
    )
    if read_s >= recompute_s:
        return Decision(value=False, reason=f"{costs}: reading never beats computing", source=source)
    needed = max(1, math.ceil(write_s / (recompute_s - read_s)))
    reason = f"{costs}: storing pays from use {needed} on, and {uses} are expected"
    return Decision(value=uses >= needed, reason=reason, source=source)
