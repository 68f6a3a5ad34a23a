"""The GPUs that CUDA shows to a process, by CUDA_VISIBLE_DEVICES.

The driver reads the variable in its own way, and this follows it.  The first entry decides how the list is
read: as numbers, as GPU ids ("GPU-8932f937…", any prefix that fits one GPU) or as MIG ids.  Numbers are read
up to their first letter, so "1gpu" is 1.  The list ends at the first entry that names no device: "0,-1,2"
shows GPU 0 alone, and an empty string shows none.  An entry given twice makes the whole list empty.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True, slots=True)
class MigIdentity:
    """How a MIG instance can be named."""

    uuid: str | None
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuIdentity:
    """How a GPU can be named."""

    uuid: str | None
    instances: tuple[MigIdentity, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class VisibleDevice:
    """A visible device: the number of its GPU, and of its MIG instance if one was named."""

    gpu: int
    instance: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The visible devices in CUDA's order, and why some are not among them."""

    devices: tuple[VisibleDevice, ...]
    note: str | None = None


def select_visible(value: str | None, *, gpus: Sequence[GpuIdentity]) -> Selection:
    """Apply the variable's value (None: not set) to the GPUs of this machine."""
    if value is None:
        return Selection(devices=tuple(VisibleDevice(gpu=number) for number in range(len(gpus))))
    entries = [entry.strip() for entry in value.split(",")]
    if entries == [""]:
        return Selection(devices=(), note=f"{VARIABLE} is empty, which hides every GPU")
    if entries[0].startswith("MIG-"):
        return _read(entries, value=value, device_of=lambda entry: _device_of_mig(entry, gpus))
    if entries[0].startswith("GPU-"):
        return _read(entries, value=value, device_of=lambda entry: _device_of_uuid(entry, gpus))
    listed = _read(entries, value=value, device_of=_device_of_number)
    # A number past the last GPU ends the list too, but only after the whole list was searched for repeats.
    real = tuple(itertools.takewhile(lambda device: device.gpu < len(gpus), listed.devices))
    if len(real) < len(listed.devices):
        return Selection(devices=real, note=_ends_at(value, str(listed.devices[len(real)].gpu)))
    return listed


def _read(
    entries: Sequence[str], *, value: str, device_of: Callable[[str], VisibleDevice | None]
) -> Selection:
    devices: list[VisibleDevice] = []
    for entry in entries:
        device = device_of(entry)
        if device is None:
            return Selection(devices=tuple(devices), note=_ends_at(value, entry))
        if device in devices:
            return Selection(
                devices=(), note=f"{VARIABLE}={value} names a device twice, which hides every GPU"
            )
        devices.append(device)
    return Selection(devices=tuple(devices))


def _ends_at(value: str, entry: str) -> str:
    return f"{VARIABLE}={value} ends at {entry!r}: no such device"


def _device_of_number(entry: str) -> VisibleDevice | None:
    number = re.match(r"\+?\d+", entry)
    return None if number is None else VisibleDevice(gpu=int(number[0]))


def _device_of_uuid(entry: str, gpus: Sequence[GpuIdentity]) -> VisibleDevice | None:
    if not entry.startswith("GPU-"):
        return None
    found = [number for number, gpu in enumerate(gpus) if gpu.uuid and gpu.uuid.startswith(entry)]
    return VisibleDevice(gpu=found[0]) if len(found) == 1 else None


def _device_of_mig(entry: str, gpus: Sequence[GpuIdentity]) -> VisibleDevice | None:
    if not entry.startswith("MIG-"):
        return None
    found = [
        VisibleDevice(gpu=number, instance=position)
        for number, gpu in enumerate(gpus)
        for position, instance in enumerate(gpu.instances)
        if _is_called(entry, gpu=gpu, instance=instance)
    ]
    return found[0] if len(found) == 1 else None


def _is_called(entry: str, *, gpu: GpuIdentity, instance: MigIdentity) -> bool:
    if instance.uuid and instance.uuid.startswith(entry):
        return True
    # Drivers before R470: MIG-<id of the GPU>/<GPU instance>/<compute instance>.
    numbers = f"{instance.gpu_instance}/{instance.compute_instance}"
    return entry == f"MIG-{gpu.uuid}/{numbers}"
