"""The host, read again and again: CPU, memory, disk and network.

Rates are differences of the kernel's counters over the time between two readings, so the first reading has
none.  In a container with a quota the CPU share is the group's own use of its quota; elsewhere it is that of
the machine, other people's processes included.  Limits change seldom and cost half a millisecond to find:
they are read again once a minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from flatout.hardware.cgroup import LimitingGroups, limiting_groups
from flatout.hardware.host import HostFacts, read_host, read_shm
from flatout.monitor.sample import HostSample

FACTS_EVERY_S = 60.0
FIRST = "a rate needs two readings"
# Figures of a HostSample -> psutil's counters they are rates of.
DISK_RATES = {"disk_read_bytes_per_s": "read_bytes", "disk_write_bytes_per_s": "write_bytes"}
NETWORK_RATES = {"network_received_bytes_per_s": "bytes_recv", "network_sent_bytes_per_s": "bytes_sent"}
FIGURES = {"cpu_share", *DISK_RATES, *NETWORK_RATES}
LOOPBACK = ("lo", "lo0")  # Linux, macOS and the BSDs: what it carries never leaves the machine


class HostMeter:
    """Reads the host; each `read` returns the figures since the previous one."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._facts: HostFacts | None = None
        self._groups = LimitingGroups()
        self._facts_at_s = 0.0
        self._last: dict[str, float] | None = None
        self._last_at_s = 0.0

    def read(self, now_s: float) -> HostSample:
        """Read the host; `now_s` is monotonic."""
        if self._facts is None or now_s - self._facts_at_s >= FACTS_EVERY_S:
            self._facts, self._groups = read_host(self._root), limiting_groups(self._root)
            self._facts_at_s = now_s
        facts = self._facts
        counters = self._counters()
        missing = dict.fromkeys(FIGURES - counters.keys(), "the operating system does not report it")
        rates: dict[str, float] = {}
        span_s = now_s - self._last_at_s
        if self._last is None or span_s <= 0:
            missing |= dict.fromkeys(counters, FIRST)
        else:
            # A counter that fell was started again: a disk or an interface was replaced.
            shared = counters.keys() & self._last
            rates = {name: max(counters[name] - self._last[name], 0.0) / span_s for name in shared}
        self._last, self._last_at_s = counters, now_s
        cpu = rates.pop("cpu_share", None)
        return HostSample(
            cpu_share=None if cpu is None or not facts.cores else min(cpu / self._counted_cores(facts), 1.0),
            cores=facts.cores,
            memory_used_bytes=self._memory_used_bytes(facts),
            memory_total_bytes=facts.memory_bytes,
            memory_limited_by=facts.memory_limited_by,
            shm_free_bytes=self._shm_free_bytes(),
            **rates,
            missing=missing,
        )

    def _counters(self) -> dict[str, float]:
        """Read counters since boot; `cpu_share` counts seconds of all cores."""
        used_s = self._groups.cpu_used_s()
        counters = {"cpu_share": _busy_s() if used_s is None else used_s}
        disks, networks = psutil.disk_io_counters(nowrap=False), _networks()
        for rows, fields in (([disks] if disks is not None else [], DISK_RATES), (networks, NETWORK_RATES)):
            if rows:
                counters |= {name: sum(getattr(row, field) for row in rows) for name, field in fields.items()}
        return counters

    def _counted_cores(self, facts: HostFacts) -> float:
        """Return the cores whose seconds were counted: the quota's, or the machine's."""
        if self._groups.cpu_used_s() is not None and self._groups.cores:
            return self._groups.cores
        return facts.machine_cores or facts.cores or 1.0

    def _memory_used_bytes(self, facts: HostFacts) -> int | None:
        if facts.memory_limited_by == "the control group":
            return self._groups.memory_used_bytes()
        memory = psutil.virtual_memory()
        return memory.total - memory.available

    def _shm_free_bytes(self) -> int | None:
        try:
            return read_shm(self._root)[1]
        except OSError:
            return None


def _networks() -> list[Any]:
    """Return the counters of every interface but the loopback."""
    found = psutil.net_io_counters(pernic=True, nowrap=False) or {}
    return [counters for name, counters in found.items() if name not in LOOPBACK]


def _busy_s() -> float:
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # Guests are already part of user and nice.
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - idle_s - guests_s
