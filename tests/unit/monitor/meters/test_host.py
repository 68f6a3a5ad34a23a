"""The host: rates need two readings, and a container's quota is what its share is of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flatout.monitor.meters.host import FACTS_EVERY_S, FIGURES, HostMeter

V2_MOUNT = "32 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """Two cores of quota and 1000 kB of memory."""
    write(
        tmp_path,
        proc__self__cgroup="0::/\n",
        proc__self__mountinfo=V2_MOUNT,
        proc__meminfo="MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n",
        sys__fs__cgroup__cpu_dot_max="200000 100000\n",
        sys__fs__cgroup__cpu_dot_stat="usage_usec 1000000\n",
        sys__fs__cgroup__memory_dot_max="1000000\n",
        sys__fs__cgroup__memory_dot_current="400000\n",
    )
    return tmp_path


def test_the_first_reading_has_no_rates_and_says_why() -> None:
    meter = HostMeter()
    first = meter.read(1.0)
    assert (first.cpu_share, first.disk_read_bytes_per_s) == (None, None)
    assert "two readings" in first.missing["cpu_share"]
    assert first.memory_used_bytes is not None and first.memory_total_bytes is not None
    assert 0 < first.memory_used_bytes <= first.memory_total_bytes
    second = meter.read(2.0)
    assert second.cpu_share is not None
    assert 0 <= second.cpu_share <= 1
    assert "cpu_share" not in second.missing


def test_every_rate_is_known_or_has_a_reason() -> None:
    meter = HostMeter()
    meter.read(1.0)
    sample = meter.read(2.0)
    for name in FIGURES:
        assert (getattr(sample, name) is None) == (name in sample.missing)


def test_a_containers_share_is_of_its_quota(container: Path) -> None:
    meter = HostMeter(container)
    first = meter.read(10.0)
    assert (first.memory_used_bytes, first.memory_total_bytes) == (400000, 1000000)
    assert first.memory_limited_by == "the control group"
    write(container, sys__fs__cgroup__cpu_dot_stat="usage_usec 2000000\n")
    write(container, sys__fs__cgroup__memory_dot_current="700000\n")
    second = meter.read(11.0)
    assert second.cpu_share == pytest.approx(0.5)  # one second of the two that the quota gives
    assert second.memory_used_bytes == 700000


def test_limits_are_read_again_after_a_while(container: Path) -> None:
    meter = HostMeter(container)
    meter.read(0.0)
    write(container, sys__fs__cgroup__memory_dot_max="2000000\n")
    assert meter.read(1.0).memory_total_bytes == 1000000
    assert meter.read(FACTS_EVERY_S + 1).memory_total_bytes == 2000000


def test_a_counter_that_was_started_again_is_no_negative_rate(container: Path) -> None:
    meter = HostMeter(container)
    meter.read(1.0)
    write(container, sys__fs__cgroup__cpu_dot_stat="usage_usec 0\n")
    assert meter.read(2.0).cpu_share == 0.0


def test_what_a_machine_sends_to_itself_is_not_network(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {
        "lo": SimpleNamespace(bytes_recv=0, bytes_sent=0),
        "eth0": SimpleNamespace(bytes_recv=0, bytes_sent=0),
    }
    monkeypatch.setattr("psutil.net_io_counters", lambda pernic=False, nowrap=True: counters)
    meter = HostMeter()
    meter.read(1.0)
    counters["lo"] = SimpleNamespace(bytes_recv=10**9, bytes_sent=10**9)
    counters["eth0"] = SimpleNamespace(bytes_recv=500, bytes_sent=200)
    sample = meter.read(2.0)
    assert (sample.network_received_bytes_per_s, sample.network_sent_bytes_per_s) == (500.0, 200.0)


def test_a_machine_with_the_loopback_alone_has_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"lo": SimpleNamespace(bytes_recv=0, bytes_sent=0)}
    monkeypatch.setattr("psutil.net_io_counters", lambda pernic=False, nowrap=True: counters)
    meter = HostMeter()
    meter.read(1.0)
    sample = meter.read(2.0)
    assert sample.network_sent_bytes_per_s is None
    assert "network_sent_bytes_per_s" in sample.missing
