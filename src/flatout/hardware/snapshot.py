"""What NVML said at one moment.  A snapshot never changes; the reader that took it can take another.

Unknown is None, with the reason under the field's name in `missing`.  Two figures are easily misread.
`utilisation_share` is the share of NVML's last sample window in which some kernel ran, however small:
100 % does not mean that the GPU is well used.  `memory_used_bytes` counts every process, and what a CUDA
context takes before the first tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.hardware.device import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that holds a context on a GPU."""

    pid: int
    name: str | None
    used_bytes: int | None
    kind: str  # "compute", "graphics" or "compute and graphics"
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSnapshot:
    """One GPU, or one MIG instance of it, at one moment."""

    index: int  # NVML's number: the order of the PCI bus
    name: str | None
    uuid: str | None
    cuda_index: int | None = None  # the number CUDA gives it in this environment
    compute_capability: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_reserved_bytes: int | None = None  # the driver's own; CUDA's total is what this leaves
    utilisation_share: float | None = None
    memory_utilisation_share: float | None = None  # of the window in which memory was read or written
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_hz: float | None = None
    sm_clock_max_hz: float | None = None
    memory_clock_hz: float | None = None
    memory_clock_max_hz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    lost: bool = False  # it stopped answering; what had been read before stands
    mig_enabled: bool | None = None
    mig_index: int | None = None  # set on a MIG instance: its number on the GPU `index`
    instances: tuple[GpuSnapshot, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> Device | None:
        """The facts that do not change; None for a GPU whose name is unknown."""
        from flatout.hardware.device import device_of_driver  # it brings the table of datasheets

        if self.name is None:
            return None
        return device_of_driver(
            self.name,
            memory_bytes=self.memory_total_bytes,
            compute_capability=self.compute_capability,
            uuid=self.uuid,
            index=self.index,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Every visible GPU of the machine at one moment."""

    taken_at_s: float  # seconds since the epoch
    gpus: tuple[GpuSnapshot, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None  # the highest the driver supports, not the one torch was built with
    notes: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def why_no_gpu(self) -> str:
        """Why there is no GPU, if there is none."""
        return self.missing.get("gpus") or next(iter(self.notes), "the driver sees no GPU")

    @property
    def computing(self) -> tuple[GpuSnapshot, ...]:
        """What a job can run on: whole GPUs, and of a GPU in MIG mode its instances."""
        return tuple(
            part
            for gpu in self.gpus
            for part in (gpu.instances if gpu.mig_enabled else (gpu,))
            if not part.lost
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(device for gpu in self.computing if (device := gpu.device) is not None)
