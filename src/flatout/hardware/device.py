"""A device as the rest of the package sees it: what it is and what it can do at most.

These are the facts that do not change while a job runs.  A real GPU gets its name, memory and compute
capability from the driver and its peaks from the datasheet; a simulated one gets all of them from the
datasheet.  Both are the same type, so that a plan made for a GPU that is not there runs the same code.

Peaks are dense.  What a kernel reaches is less: clocks drop under load, and a matrix product has to be
large before it fills the chip.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flatout.hardware.datasheet import Datasheet
from flatout.hardware.matching import find_datasheet

FIRST_CAPABILITY_WITH_BF16 = 8.0
FIRST_CAPABILITY_WITH_FP16 = 7.0  # tensor cores begin with Volta


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU, real or simulated; unknown is None, with the reason in `missing`."""

    name: str
    memory_bytes: int | None  # the driver's total; a CUDA process gets a few percent less
    compute_capability: str | None = None
    bf16: bool | None = None  # the matrix units compute in bfloat16
    peak_flops: dict[str, float] = field(default_factory=dict)  # dense, per second, by dtype
    bandwidth_bytes_per_s: float | None = None
    simulated: bool = False
    uuid: str | None = None
    index: int | None = None  # NVML's number of the GPU
    datasheet: str | None = None  # the row the peaks come from
    source: str | None = None  # the vendor's document behind that row
    missing: dict[str, str] = field(default_factory=dict)


def device_of_datasheet(row: Datasheet) -> Device:
    """Make the device that a datasheet describes."""
    missing = {} if row.compute_capability else {"compute_capability": f"{row.vendor} has no such number"}
    return Device(
        name=row.name,
        memory_bytes=row.memory_bytes,
        compute_capability=row.compute_capability,
        bf16=row.bf16,
        peak_flops=dict(row.peak_flops),
        bandwidth_bytes_per_s=row.bandwidth_bytes_per_s,
        simulated=True,
        datasheet=row.name,
        source=row.source,
        missing=missing,
    )


def device_of_driver(
    name: str,
    *,
    memory_bytes: int | None,
    compute_capability: str | None = None,
    uuid: str | None = None,
    index: int | None = None,
) -> Device:
    """Make a device that is present: the driver's facts first, the datasheet for the rest.

    The name may come from NVML or from torch; both report the same string.
    """
    row = find_datasheet(name, memory_bytes=memory_bytes)
    capability = compute_capability or (row.compute_capability if row else None)
    missing: dict[str, str] = {}
    if memory_bytes is None:
        missing["memory_bytes"] = "the driver did not report it"
    if capability is None:
        missing["compute_capability"] = "the driver did not report it and no datasheet is known"
    if row is None:
        reason = (
            "a MIG instance is a part of a GPU; the datasheet lists only whole ones"
            if " MIG " in name
            else f"no datasheet for {name!r}"
        )
        missing["peak_flops"] = missing["bandwidth_bytes_per_s"] = reason
    bf16 = row.bf16 if row else None
    if bf16 is None and capability is not None:
        bf16 = float(capability) >= FIRST_CAPABILITY_WITH_BF16
    if bf16 is None:
        missing["bf16"] = "neither a compute capability nor a datasheet is known"
    return Device(
        name=name,
        memory_bytes=memory_bytes,
        compute_capability=capability,
        bf16=bf16,
        peak_flops=dict(row.peak_flops) if row else {},
        bandwidth_bytes_per_s=row.bandwidth_bytes_per_s if row else None,
        uuid=uuid,
        index=index,
        datasheet=row.name if row else None,
        source=row.source if row else None,
        missing=missing,
    )


def half_format(compute_capability: str | None) -> Literal["bfloat16", "float16"] | None:
    """Return the 16-bit format that a GPU multiplies in hardware, bfloat16 if it can; None for neither."""
    try:
        capability = float(compute_capability or "")
    except ValueError:
        return None
    if capability >= FIRST_CAPABILITY_WITH_BF16:
        return "bfloat16"
    return "float16" if capability >= FIRST_CAPABILITY_WITH_FP16 else None
