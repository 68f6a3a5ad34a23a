"""Where the model goes: one replica per GPU if it fits on one, shards over several only if it does not.

A model cut over two GPUs by a device map runs on one of them at a time: the second waits for the first one's
last layer, and two GPUs do the work of one.  Two replicas do the work of two.  So a model is sharded only
where its weights and some room for the rows of a batch do not fit in the memory that is free on one GPU, and
then over as few GPUs as hold it; GPUs that are left over get replicas of their own.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flatout.decisions import Decision
from flatout.errors import BadInput, BatchDoesNotFit
from flatout.units import show_bytes

if TYPE_CHECKING:
    from flatout.hardware.snapshot import Snapshot

DType = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = ("auto", "float32", "bfloat16", "float16")
ROOM_SHARE = 0.25  # of the free memory: cache of the rows, activations of a prefill, the CUDA context
LONGEST_HEADER_BYTES = 100 << 20  # what the safetensors format itself allows


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRoom:
    """A GPU as a process is told of it, and the memory that is free there."""

    name: str  # what CUDA_VISIBLE_DEVICES takes: a UUID or a number
    free_bytes: int
    index: int | None = None  # CUDA's number for it in this process


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The GPUs of each replica; a replica without one runs on the CPU."""

    replicas: tuple[tuple[str, ...], ...]

    @property
    def is_sharded(self) -> bool:
        return any(len(gpus) > 1 for gpus in self.replicas)

    def __str__(self) -> str:
        if not self.replicas[0]:
            return f"{len(self.replicas)} on the CPU"
        if self.is_sharded:
            return f"{len(self.replicas)} of {len(self.replicas[0])} GPUs each"
        return f"{len(self.replicas)}, one per GPU"


def place(
    *,
    weights_bytes: int,
    gpus: Sequence[GpuRoom],
    workers: int | None = None,
    device: str = "auto",
) -> Decision[Placement]:
    """The replicas of a model; `workers` limits their number on GPUs and is their number on a CPU."""
    if workers is not None and workers < 1:
        raise BadInput(f"--workers {workers}", hint="take at least 1")
    if device == "cpu" or not gpus:
        if device == "cuda":
            raise BadInput("no GPU is visible", hint="take --device cpu, or check flatout devices")
        why = "the CPU was asked for" if device == "cpu" else "no GPU is visible"
        return Decision(value=Placement(replicas=((),) * (workers or 1)), reason=why, source="computed")
    by_room = sorted(gpus, key=lambda gpu: -gpu.free_bytes)
    fitting = [gpu for gpu in by_room if weights_bytes <= usable_bytes(gpu)]
    if fitting:
        chosen = fitting[: workers or len(fitting)]
        reason = (
            f"weights of {show_bytes(weights_bytes)} fit in the {show_bytes(usable_bytes(chosen[-1]))} "
            f"that a GPU offers with {ROOM_SHARE:.0%} of its free memory kept for rows"
        )
        if len(fitting) < len(gpus):
            reason += f"; {len(gpus) - len(fitting)} of {len(gpus)} GPUs have too little free"
        placed = Placement(replicas=tuple((gpu.name,) for gpu in chosen))
        return Decision(value=placed, reason=reason, source="computed")
    return _sharded(by_room, weights_bytes=weights_bytes, workers=workers)


def usable_bytes(gpu: GpuRoom) -> int:
    return int(gpu.free_bytes * (1 - ROOM_SHARE))


def _sharded(by_room: Sequence[GpuRoom], *, weights_bytes: int, workers: int | None) -> Decision[Placement]:
    held = list(itertools.accumulate(map(usable_bytes, by_room)))
    size = next((number for number, total in enumerate(held, start=1) if total >= weights_bytes), None)
    if size is None:
        raise BatchDoesNotFit(
            f"weights of {show_bytes(weights_bytes)} do not fit: {len(by_room)} GPUs offer "
            f"{show_bytes(held[-1])} with {ROOM_SHARE:.0%} of what is free kept for rows",
            hint="free or add GPUs, take a smaller dtype, or --device cpu",
        )
    groups = [by_room[start : start + size] for start in range(0, len(by_room) - size + 1, size)]
    whole = [group for group in groups if sum(map(usable_bytes, group)) >= weights_bytes]
    replicas = tuple(tuple(gpu.name for gpu in group) for group in whole[: workers or len(whole)])
    reason = (
        f"weights of {show_bytes(weights_bytes)} do not fit in the {show_bytes(usable_bytes(by_room[0]))} "
        f"that the roomiest GPU offers; {size} together hold them, and run one after the other"
    )
    return Decision(value=Placement(replicas=replicas), reason=reason, source="computed")


def gpus_of(snapshot: Snapshot) -> list[GpuRoom]:
    """The GPUs that this process may use and whose free memory is known."""
    return [
        GpuRoom(name=gpu.uuid or str(gpu.cuda_index), free_bytes=gpu.memory_free_bytes, index=gpu.cuda_index)
        for gpu in snapshot.computing
        if gpu.memory_free_bytes is not None and (gpu.uuid is not None or gpu.cuda_index is not None)
    ]


def weights_bytes(folder: Path, *, dtype: DType, on_gpu: bool) -> int:
    """Bytes of a model's weights once loaded, read from the headers of its safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInput(
            f"{folder} has no .safetensors file",
            hint="save the model with save_pretrained; no pickle is read",
        )
    width = 4 if chosen_dtype(dtype, on_gpu=on_gpu) == "float32" else 2
    return width * sum(map(_num_elements, files))


def chosen_dtype(dtype: DType, *, on_gpu: bool) -> str:
    """On a CPU bfloat16 is emulated, and slower than float32."""
    return dtype if dtype != "auto" else "bfloat16" if on_gpu else "float32"


def _num_elements(path: Path) -> int:
    """Numbers in a safetensors file; its first eight bytes say how long the JSON header is."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LONGEST_HEADER_BYTES:
                raise ValueError(length)
            header = json.loads(file.read(length))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, struct.error, KeyError, TypeError, AttributeError):
        raise BadInput(f"{path} is no safetensors file", hint="copy or download it again") from None
