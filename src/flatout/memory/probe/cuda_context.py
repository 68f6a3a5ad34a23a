"""The CUDA context of one process: what the driver holds for it besides PyTorch's segments.

Where NVML counts memory by process it is this process's share, less what the allocator reserved.  Containers
often hide processes, or number them as the host does; then it is the memory in use by the driver's figures,
less that before the probe, less what the allocator reserved.  Such a difference holds only while no other
process allocates or frees memory, so it is taken several times; if the values disagree, there is no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.ground.units import show_bytes
from flatout.hardware.snapshot import GpuSnapshot

LIKE_BYTES = 64 << 20  # kernels that a library loads late make a context grow by less
MOST_BYTES = 3 << 30  # no context is larger


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A GPU as the driver sees it, and what PyTorch's allocator of this process holds of it."""

    used_bytes: int | None
    own_bytes: int | None  # of this process
    pids: frozenset[int]  # of all processes that the driver names, by whatever numbers
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The size of a CUDA context, or why it is not known."""

    num_bytes: int | None
    missing: str | None


def reading_of(gpu: GpuSnapshot | None, *, pid: int, reserved_bytes: int) -> Reading:
    processes = (gpu.processes if gpu is not None else None) or ()
    return Reading(
        used_bytes=None if gpu is None else gpu.memory_used_bytes,
        own_bytes=next((each.used_bytes for each in processes if each.pid == pid), None),
        pids=frozenset(each.pid for each in processes),
        reserved_bytes=reserved_bytes,
    )


def context_of(before: Reading, readings: Sequence[Reading]) -> Context:
    """Compute the context from a reading without it and some with it, each after a part of the work."""
    last = readings[-1]
    if last.own_bytes is not None and last.own_bytes > last.reserved_bytes:
        return Context(num_bytes=last.own_bytes - last.reserved_bytes, missing=None)
    if before.used_bytes is None or any(each.used_bytes is None for each in readings):
        return _unknown("the driver does not say how much of the GPU is used")
    came = last.pids - before.pids
    if len(came) > 1 or before.pids - last.pids:
        return _unknown("another process started or ended on this GPU during the probe")
    found = [(each.used_bytes or 0) - before.used_bytes - each.reserved_bytes for each in readings]
    if max(found) - min(found) > LIKE_BYTES or not 0 < found[-1] <= MOST_BYTES:
        said = " and ".join(show_bytes(each) for each in sorted({min(found), max(found)}))
        return _unknown(
            "another process allocated or freed memory on this GPU during the probe: "
            f"the driver's figures give {said} for the context"
        )
    return Context(num_bytes=found[-1], missing=None)


def _unknown(reason: str) -> Context:
    return Context(num_bytes=None, missing=reason)
