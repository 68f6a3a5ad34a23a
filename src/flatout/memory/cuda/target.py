"""What a trace has to know of the GPU it is made for: its generation, and how many multiprocessors it has.

Attention kernels are chosen by the compute capability; kernels that sum keep a part for each multiprocessor.
"""

from __future__ import annotations

from flatout.decisions import Decision
from flatout.hardware.datasheet_rows import MULTIPROCESSORS
from flatout.hardware.device import Device
from flatout.memory.predict.estimate import NO_WORKSPACES


def capability_of(device: Device | None) -> tuple[int, int] | None:
    if device is None or device.compute_capability is None:
        return None
    major, _, minor = device.compute_capability.partition(".")
    return int(major), int(minor or 0)


def multiprocessors_of(device: Device | None) -> int | None:
    """By the device's datasheet; None where it has none."""
    return MULTIPROCESSORS.get(device.datasheet) if device and device.datasheet else None


def workspaces_for(device: Device | None) -> Decision[tuple[int, ...]]:
    """None beside those of the trace, which are assumed where the device's multiprocessors are."""
    if device is None or multiprocessors_of(device) is not None:
        return NO_WORKSPACES
    from flatout.memory.cuda.workspaces import ASSUMED_MULTIPROCESSORS

    reason = f"sized for {ASSUMED_MULTIPROCESSORS} multiprocessors; how many {device.name} has is not known"
    return Decision(value=(), reason=reason, source="assumed")
