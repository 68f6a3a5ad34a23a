"""The share of the host that a job may really use.

A container on a machine with 64 cores may own four of them, and a loader with 64 workers then runs slower
than one with four.  The number that counts is the smallest of three: the machine's cores, the affinity mask
of the process, and the control group's quota (which may be a fraction).  The same holds for memory: passing
the control group's limit ends the job, however much the machine has free.  /dev/shm is where DataLoader
workers hand batches over; Docker gives it 64 MiB unless told otherwise.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path

from flatout.hardware.cgroup import limiting_groups

LINUX_ROOT = Path("/")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Cores, memory and shared memory of the host; unknown is None, with the reason in `missing`."""

    cores: float | None  # what the process may use
    cores_limited_by: str | None  # "the machine", "the affinity mask" or "the control group"
    machine_cores: int | None
    affinity_cores: int | None
    quota_cores: float | None  # None: the control group sets no quota
    memory_bytes: int | None  # what the process may use
    memory_limited_by: str | None  # "the machine" or "the control group"
    memory_used_bytes: int | None  # of that limit, by everything that shares it
    machine_memory_bytes: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    cpu_model: str | None
    missing: dict[str, str] = field(default_factory=dict)


def read_host(
    root: Path = LINUX_ROOT, *, machine_cores: int | None = None, affinity_cores: int | None = None
) -> HostFacts:
    """Read the facts of this host; `root` is the root of its file system, and the counts replace its own."""
    missing: dict[str, str] = {}
    limits = limiting_groups(root)
    machine_cores = machine_cores or os.cpu_count()
    affinity_cores = affinity_cores or _affinity_cores(missing)
    cores, cores_limited_by = _tightest(
        ("the machine", machine_cores),
        ("the affinity mask", affinity_cores),
        ("the control group", limits.cores),
    )
    machine_memory_bytes, machine_used_bytes = _machine_memory(root, missing)
    memory, memory_limited_by = _tightest(
        ("the machine", machine_memory_bytes), ("the control group", limits.memory_bytes)
    )
    grouped = memory_limited_by == "the control group"
    used_bytes = limits.memory_used_bytes() if grouped else machine_used_bytes
    if grouped and used_bytes is None:
        missing["memory_used_bytes"] = "the control group does not report its usage"
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    try:
        shm_bytes, shm_free_bytes = read_shm(root)
    except OSError as error:
        missing["shm_bytes"] = missing["shm_free_bytes"] = f"/dev/shm: {error.strerror}"
    if cores is None:
        missing["cores"] = "the operating system does not count its cores"
    return HostFacts(
        cores=cores,
        cores_limited_by=cores_limited_by,
        machine_cores=machine_cores,
        affinity_cores=affinity_cores,
        quota_cores=limits.cores,
        memory_bytes=None if memory is None else int(memory),
        memory_limited_by=memory_limited_by,
        memory_used_bytes=used_bytes,
        machine_memory_bytes=machine_memory_bytes,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        cpu_model=_cpu_model(root, missing),
        missing=missing,
    )


def _tightest(*limits: tuple[str, float | None]) -> tuple[float | None, str | None]:
    """Return the smallest limit and who sets it; of two equal ones, the earlier."""
    known = [(value, name) for name, value in limits if value is not None]
    return min(known, key=lambda limit: limit[0], default=(None, None))


def _affinity_cores(missing: dict[str, str]) -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    missing["affinity_cores"] = f"{platform.system()} has no affinity masks"
    return None


def _machine_memory(root: Path, missing: dict[str, str]) -> tuple[int | None, int | None]:
    """Read the total and used bytes of the machine."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        if root == LINUX_ROOT:
            import psutil

            memory = psutil.virtual_memory()
            return memory.total, memory.total - memory.available
        lines = []
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
    total, available = kib.get("MemTotal"), kib.get("MemAvailable")
    if total is None:
        missing["machine_memory_bytes"] = missing["memory_used_bytes"] = "no MemTotal in /proc/meminfo"
        return None, None
    if available is None:
        missing["memory_used_bytes"] = "no MemAvailable in /proc/meminfo"
        return total * 1024, None
    return total * 1024, (total - available) * 1024


def read_shm(root: Path = LINUX_ROOT) -> tuple[int, int]:
    """Read the total and free bytes of shared memory; OSError if there is none."""
    status = os.statvfs(root / "dev/shm")
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _cpu_model(root: Path, missing: dict[str, str]) -> str | None:
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    model = platform.processor() if root == LINUX_ROOT else ""
    if model:
        return model
    missing["cpu_model"] = "no model name in /proc/cpuinfo"
    return None
