"""Where the model goes: one replica per GPU if it fits on one, shards over several only if it does not.

A model cut over two GPUs by a device map runs on one of them at a time: the second waits for the first one's
last layer, and two GPUs do the work of one.  Two replicas do the work of two.  So a model is sharded only
where its weights and some room for the rows of a batch do not fit in the memory that is free on one GPU, and
then over as few GPUs as hold it; GPUs that are left over get replicas of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.engines.run.models import DTypeOrAuto, choose_dtype, find_model
from flatout.engines.run.tensor_files import open_tensors
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput, BatchDoesNotFit
from flatout.ground.units import show_bytes

if TYPE_CHECKING:
    from flatout.hardware.snapshot import Snapshot

ROOM_SHARE = 0.25  # of the free memory: cache of the rows, activations of a prefill, the CUDA context


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRoom:
    """A GPU as a process sees it, and its free memory."""

    name: str  # what CUDA_VISIBLE_DEVICES takes: a UUID or a number
    free_bytes: int
    index: int | None = None  # CUDA's number for it in this process
    capability: str | None = None  # such as "8.0"

    @property
    def usable_bytes(self) -> int:
        """Bytes that are left for weights after the share kept for rows."""
        return int(self.free_bytes * (1 - ROOM_SHARE))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The GPUs of each replica; a replica without one runs on the CPU."""

    replicas: tuple[tuple[GpuRoom, ...], ...]

    @property
    def is_sharded(self) -> bool:
        return any(len(gpus) > 1 for gpus in self.replicas)

    def __str__(self) -> str:
        if not self.replicas[0]:
            return f"{len(self.replicas)} on the CPU"
        if self.is_sharded:
            return f"{len(self.replicas)} of {len(self.replicas[0])} GPUs each"
        return f"{len(self.replicas)}, one per GPU"


def place_model(
    folder: Path, *, device: str = "auto", dtype: DTypeOrAuto = "auto", workers: int | None = None
) -> Decision[Placement]:
    """Place the replicas of a model, of a folder or the Hub, on the GPUs of this machine, or on its CPU."""
    from flatout.hardware.nvml import read_gpus

    gpus = [] if device == "cpu" else list_gpus(read_gpus())
    needed = count_weights_bytes(find_model(folder, extra="steering"), dtype=dtype, gpus=gpus)
    return place_replicas(weights_bytes=needed, gpus=gpus, workers=workers, device=device)


def place_replicas(
    *,
    weights_bytes: int,
    gpus: Sequence[GpuRoom],
    workers: int | None = None,
    device: str = "auto",
) -> Decision[Placement]:
    """Choose the GPUs of each replica; `workers` limits their number on GPUs, and sets it on a CPU."""
    if workers is not None and workers < 1:
        raise BadInput(f"--workers {workers} is below 1", hint="give at least 1")
    if device == "cpu" or not gpus:
        if device == "cuda":
            raise BadInput("no GPU is visible", hint="use --device cpu, or check flatout devices")
        why = "the CPU was asked for" if device == "cpu" else "no GPU is visible"
        return Decision(value=Placement(replicas=((),) * (workers or 1)), reason=why, source="computed")
    by_room = sorted(gpus, key=lambda gpu: -gpu.free_bytes)
    fitting = [gpu for gpu in by_room if weights_bytes <= gpu.usable_bytes]
    if not fitting:
        return _shard(by_room, weights_bytes=weights_bytes, workers=workers)
    chosen = fitting[: workers or len(fitting)]
    reason = (
        f"weights of {show_bytes(weights_bytes)} fit in the {show_bytes(chosen[-1].usable_bytes)} "
        f"that a GPU offers with {ROOM_SHARE:.0%} of its free memory kept for rows"
    )
    if len(fitting) < len(gpus):
        reason += f"; {len(gpus) - len(fitting)} of {len(gpus)} GPUs have too little free"
    placement = Placement(replicas=tuple((gpu,) for gpu in chosen))
    return Decision(value=placement, reason=reason, source="computed")


def _shard(by_room: Sequence[GpuRoom], *, weights_bytes: int, workers: int | None) -> Decision[Placement]:
    held = list(itertools.accumulate(gpu.usable_bytes for gpu in by_room))
    size = next((number for number, total in enumerate(held, start=1) if total >= weights_bytes), None)
    if size is None:
        raise BatchDoesNotFit(
            f"weights of {show_bytes(weights_bytes)} do not fit: {len(by_room)} GPUs offer "
            f"{show_bytes(held[-1])} with {ROOM_SHARE:.0%} of what is free kept for rows",
            hint="free or add GPUs, or use a smaller dtype or --device cpu",
        )
    groups = [tuple(by_room[start : start + size]) for start in range(0, len(by_room) - size + 1, size)]
    whole = [group for group in groups if sum(gpu.usable_bytes for gpu in group) >= weights_bytes]
    reason = (
        f"weights of {show_bytes(weights_bytes)} do not fit in the {show_bytes(by_room[0].usable_bytes)} "
        f"that the GPU with most free memory offers; {size} together hold them, and run one after another"
    )
    placement = Placement(replicas=tuple(whole[: workers or len(whole)]))
    return Decision(value=placement, reason=reason, source="computed")


def list_gpus(snapshot: Snapshot) -> list[GpuRoom]:
    """List the GPUs that this process may use and whose free memory is known."""
    return [
        GpuRoom(
            name=gpu.uuid or str(gpu.cuda_index),
            free_bytes=gpu.memory_free_bytes,
            index=gpu.cuda_index,
            capability=gpu.compute_capability,
        )
        for gpu in snapshot.computing
        if gpu.memory_free_bytes is not None and (gpu.uuid is not None or gpu.cuda_index is not None)
    ]


def count_weights_bytes(folder: Path, *, dtype: DTypeOrAuto, gpus: Sequence[GpuRoom]) -> int:
    """Count the bytes of a model's weights once loaded, from the headers of its safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInput(
            f"{folder} has no .safetensors file",
            hint="save the model with save_pretrained; no pickle is read",
        )
    # On GPUs of several kinds the widest type counts.
    widths = [4 if choose_dtype(dtype, capability=_capability(gpu)).value == "float32" else 2 for gpu in gpus]
    width = max(widths, default=4 if dtype in ("auto", "float32") else 2)
    return width * sum(map(_num_elements, files))


def _capability(gpu: GpuRoom) -> tuple[int, int]:
    """Read the compute capability; a GPU that does not report one is assumed to have bfloat16."""
    major, _, minor = (gpu.capability or "8.0").partition(".")
    return int(major), int(minor)


def _num_elements(path: Path) -> int:
    """Count the numbers in a safetensors file, from its header."""
    hint = "copy or download it again"
    with open_tensors(path, extra="steering", hint=hint, framework="np") as (file, _):
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
