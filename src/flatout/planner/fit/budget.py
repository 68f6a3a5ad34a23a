"""What a job may take of a device: a margin of what is free, not of what the device has.

A GPU that is there has other tenants, and the driver knows what they hold.  One that is not there is taken
to be empty; its total is the driver's figure where the datasheet has it on record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flatout.decisions import Decision
from flatout.errors import BadInput, UnknownDevice
from flatout.hardware.device import Device
from flatout.hardware.nvml import read_gpus
from flatout.hardware.simulated import simulated_device
from flatout.hardware.snapshot import GpuSnapshot, Snapshot

DEFAULT_MARGIN = 0.85


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The memory of a device, what is free of it, and the share of that which a plan may use."""

    device: Device
    total_bytes: int
    free_bytes: Decision[int]
    margin: float

    @property
    def usable_bytes(self) -> int:
        return int(self.free_bytes.value * self.margin)


def find_budget(
    *,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    margin: float = DEFAULT_MARGIN,
    ranks: int = 1,
    read: Callable[[], Snapshot] = read_gpus,
) -> Budget:
    """The budget on a named GPU, on so much memory, or on the GPUs of this machine."""
    if not 0 < margin <= 1:
        raise BadInput(
            f"--margin {margin:g} is not a share of what is free", hint="0.85 leaves 15 % to spare"
        )
    if gpu is not None and gpu_memory is not None:
        raise BadInput("--gpu and --gpu-memory name two devices", hint="give one of them")
    if gpu is not None:
        return _empty_device(simulated_device(gpu), margin=margin)
    if gpu_memory is not None:
        memory = gpu_memory.strip()
        try:
            device = simulated_device(f"{memory}GB" if _is_number(memory) else memory)
        except UnknownDevice:
            raise BadInput(
                f"--gpu-memory {gpu_memory!r} is not a size", hint='write "24GB"; a GPU is named with --gpu'
            ) from None
        return _empty_device(device, margin=margin)
    return _budget_here(read(), margin=margin, ranks=ranks)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _empty_device(device: Device, *, margin: float) -> Budget:
    assert device.memory_bytes is not None  # a simulated device is made from its memory
    free = Decision(
        value=device.memory_bytes, reason="an empty GPU, since it is not here", source="datasheet"
    )
    return Budget(device=device, total_bytes=device.memory_bytes, free_bytes=free, margin=margin)


def _budget_here(snapshot: Snapshot, *, margin: float, ranks: int) -> Budget:
    """Of several ranks the one with the least room decides; a single one runs on the first GPU."""
    hint = "plan for one that is not here: --gpu A100-80GB or --gpu-memory 24GB"
    known = [
        gpu for gpu in snapshot.computing if gpu.memory_total_bytes and gpu.memory_free_bytes is not None
    ]
    if not known:
        reason = snapshot.missing.get("gpus") or next(iter(snapshot.notes), "the driver sees no GPU")
        raise BadInput(f"no GPU to plan for: {reason}", hint=hint)
    tightest = min(known[:ranks], key=_free)
    device = tightest.device
    if device is None or tightest.memory_total_bytes is None:
        raise BadInput("the GPU does not tell its name", hint=hint)
    free = Decision(
        value=_free(tightest), reason=f"the driver reports it for GPU {tightest.index}", source="measured"
    )
    return Budget(device=device, total_bytes=tightest.memory_total_bytes, free_bytes=free, margin=margin)


def _free(gpu: GpuSnapshot) -> int:
    return gpu.memory_free_bytes or 0
