"""Device facts: what NVML, the host and the vendors' datasheets say, and devices that are not there.

Nothing here imports torch, and NVML's bindings are imported only when GPUs are read.
"""

from __future__ import annotations

from flatout.hardware.datasheet import DTYPES, Datasheet, Dtype
from flatout.hardware.device import Device, device_of_driver
from flatout.hardware.host import HostFacts, read_host
from flatout.hardware.matching import all_datasheets, find_datasheet
from flatout.hardware.nvml import GpuReader, read_gpus
from flatout.hardware.simulated import simulated_device
from flatout.hardware.snapshot import GpuProcess, GpuSnapshot, Snapshot

__all__ = [
    "DTYPES",
    "Datasheet",
    "Device",
    "Dtype",
    "GpuProcess",
    "GpuReader",
    "GpuSnapshot",
    "HostFacts",
    "Snapshot",
    "all_datasheets",
    "device_of_driver",
    "find_datasheet",
    "read_gpus",
    "read_host",
    "simulated_device",
]
