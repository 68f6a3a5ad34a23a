"""Host facts from a tree of files, and this machine's own against the standard library."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flatout.ground.codec import decode, encode
from flatout.hardware.host import HostFacts, read_host

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\n"
CPUINFO = "processor\t: 0\nmodel name\t: Xeon Test\n\nprocessor\t: 1\nmodel name\t: Xeon Test\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 1000 KiB of memory and no control groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    (tmp_path / "proc/cpuinfo").write_text(CPUINFO)
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def limit(root: Path, **files: str) -> None:
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "proc/self/mountinfo").write_text("1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    for name, text in files.items():
        (group / name.replace("_", ".")).write_text(text)


def test_a_machine_without_limits(root: Path) -> None:
    host = read_host(root, machine_cores=8, affinity_cores=8)
    assert (host.cores, host.cores_limited_by, host.quota_cores) == (8, "the machine", None)
    assert (host.memory_bytes, host.memory_limited_by) == (1000 * 1024, "the machine")
    assert host.memory_used_bytes == 600 * 1024
    assert host.cpu_model == "Xeon Test"
    assert host.missing == {}


@pytest.mark.parametrize(
    ("machine", "affinity", "quota", "cores", "limited_by"),
    [
        (64, 64, "max 100000", 64, "the machine"),
        (64, 4, "max 100000", 4, "the affinity mask"),
        (64, 8, "150000 100000", 1.5, "the control group"),
        (2, 2, "800000 100000", 2, "the machine"),
    ],
)
def test_the_smallest_number_of_cores_counts(
    root: Path, machine: int, affinity: int, quota: str, cores: float, limited_by: str
) -> None:
    limit(root, cpu_max=quota)
    host = read_host(root, machine_cores=machine, affinity_cores=affinity)
    assert (host.cores, host.cores_limited_by) == (cores, limited_by)


def test_a_memory_limit_counts_its_own_usage(root: Path) -> None:
    limit(root, memory_max="2048", memory_current="1024")
    host = read_host(root)
    assert (host.memory_bytes, host.memory_limited_by, host.memory_used_bytes) == (
        2048,
        "the control group",
        1024,
    )
    assert host.machine_memory_bytes == 1000 * 1024


def test_a_memory_limit_above_the_machine_is_none(root: Path) -> None:
    limit(root, memory_max=str(2**40), memory_current="5")
    host = read_host(root)
    assert (host.memory_bytes, host.memory_limited_by) == (1000 * 1024, "the machine")
    assert host.memory_used_bytes == 600 * 1024


def test_a_limit_that_hides_its_usage_leaves_a_reason(root: Path) -> None:
    limit(root, memory_max="2048")
    host = read_host(root)
    assert host.memory_used_bytes is None
    assert "control group" in host.missing["memory_used_bytes"]


def test_everything_absent_is_none_with_a_reason(tmp_path: Path) -> None:
    host = read_host(tmp_path, machine_cores=4, affinity_cores=4)
    for name in ("memory_bytes", "memory_used_bytes", "shm_bytes", "shm_free_bytes", "cpu_model"):
        assert getattr(host, name) is None
    assert {"machine_memory_bytes", "memory_used_bytes", "shm_bytes", "shm_free_bytes", "cpu_model"} <= set(
        host.missing
    )


def test_an_old_kernel_without_available_memory(root: Path) -> None:
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nHugePages_Total: 0\n")
    host = read_host(root)
    assert (host.memory_bytes, host.memory_used_bytes) == (1000 * 1024, None)
    assert "MemAvailable" in host.missing["memory_used_bytes"]


def test_this_machine() -> None:
    host = read_host()
    machine = os.cpu_count()
    assert machine is not None
    assert host.cores is not None and 0 < host.cores <= machine
    if hasattr(os, "sched_getaffinity"):
        assert host.cores <= len(os.sched_getaffinity(0))
    assert host.memory_bytes is not None and host.memory_bytes > 2**26
    assert host.machine_memory_bytes is not None and host.memory_bytes <= host.machine_memory_bytes
    for name, reason in host.missing.items():
        assert getattr(host, name) is None and reason


def test_facts_survive_json() -> None:
    host = read_host()
    assert decode(HostFacts, encode(host)) == host
