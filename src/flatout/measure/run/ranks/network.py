"""An all-reduce of two sizes, and the nominal speed of the link it crosses.

The slope between the sizes is bandwidth, free of the latency that both pay.  A ring moves 2 (n - 1) / n bytes
through every link for each byte of the result, so that factor turns the slope into bytes through the slowest
link, one way.  /sys holds the link's nominal speed: the rates of InfiniBand ports, which NCCL uses together,
else the speed of the fastest network card that is up.  Virtual devices report arbitrary speeds and are
ignored.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flatout.ground.torchrun import read_launch
from flatout.measure.evidence import Network

SIZES = {"cpu": (1 << 20, 1 << 24), "cuda": (1 << 23, 1 << 26)}  # bytes
REPEATS = 3
KEY = "flatout/network/"
WAIT_S = 120.0
SYSTEM = Path("/sys/class")
BITS = 8


def measure_network(device: str, store: Any) -> Network | None:
    """Time the all-reduces; every rank calls this between the same two steps, or none starts.

    A rank that cannot take part must say so before the others begin: they would wait for it for ever.
    """
    import torch.distributed as distributed

    num_ranks = read_launch().num_ranks
    tensors: list[Any] = []
    with contextlib.suppress(RuntimeError):  # out of memory; the other ranks learn of it
        tensors = _tensors(device)
    if not all_ready(store, num_ranks, bool(tensors)):
        return None
    small_s, large_s = (_seconds(partial(distributed.all_reduce, each), device) for each in tensors)
    backend = str(distributed.get_backend())
    link, link_bytes_per_s = link_speed(backend)
    small, large = SIZES[device]
    return Network(
        backend=backend,
        num_ranks=num_ranks,
        small_bytes=small,
        small_s=small_s,
        large_bytes=large,
        large_s=large_s,
        bus_bytes_per_s=bus_bandwidth((small, small_s), (large, large_s), num_ranks=num_ranks),
        link=link,
        link_bytes_per_s=link_bytes_per_s,
    )


def _tensors(device: str) -> list[Any]:
    import torch

    return [torch.zeros(size // 4, dtype=torch.float32, device=device) for size in SIZES[device]]


def _seconds(act: Callable[[], Any], device: str) -> float:
    """Return the shortest of a few timings, after an untimed warm-up."""
    import torch

    took = []
    for _ in range(1 + REPEATS):
        began_s = time.perf_counter()
        act()
        if device == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began_s)
    return min(took[1:])


def all_ready(store: Any, num_ranks: int, able: bool, *, wait_s: float = WAIT_S) -> bool:
    """Return whether all ranks came here and are able; every rank gets the same answer."""
    if able:
        store.add(f"{KEY}able", 1)
    store.add(f"{KEY}here", 1)
    deadline_s = time.monotonic() + wait_s
    while store.add(f"{KEY}here", 0) < num_ranks:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return bool(store.add(f"{KEY}able", 0) >= num_ranks)


def bus_bandwidth(small: tuple[int, float], large: tuple[int, float], *, num_ranks: int) -> float | None:
    """Return bytes per second through the slowest link, from (bytes, seconds) of two sizes."""
    more_s = large[1] - small[1]
    if more_s <= 0:
        return None
    return (large[0] - small[0]) / more_s * 2 * (num_ranks - 1) / num_ranks


def link_speed(backend: str, system: Path = SYSTEM) -> tuple[str | None, float | None]:
    """Return the link to other nodes and its bytes per second, one way; None if unknown."""
    if backend == "nccl" and (rates := _infiniband(system)):
        return "+".join(rates), sum(rates.values())
    cards: dict[str, float] = {}
    for folder in sorted(system.glob("net/*")):
        with contextlib.suppress(OSError, ValueError):
            megabits = int((folder / "speed").read_text())
            if (folder / "device").exists() and megabits > 0:
                cards[folder.name] = megabits * 1e6 / BITS
    if not cards:
        return None, None
    fastest = max(cards, key=lambda name: cards[name])
    return fastest, cards[fastest]


def _infiniband(system: Path) -> dict[str, float]:
    """Return the bytes per second of each port that is up, from lines like `400 Gb/sec (4X NDR)`."""
    rates: dict[str, float] = {}
    for port in sorted(system.glob("infiniband/*/ports/*")):
        with contextlib.suppress(OSError):
            rate = re.match(r"([\d.]+) Gb/sec", (port / "rate").read_text())
            if rate and "ACTIVE" in (port / "state").read_text():
                rates[port.parents[1].name] = float(rate[1]) * 1e9 / BITS
    return rates
