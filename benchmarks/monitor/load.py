"""Fifty browsers on one run: whether each has its sample every second, and what the job pays for it.

The job is this process, under watch.  Its page is served by `flatout watch --web` in a process of its own,
and the browsers are connections of a third.  Rounds with and without browsers alternate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from arms import Step, flatout, off
from interleaved import ratio

BROWSERS = Path(__file__).with_name("browsers.py")
NUM_BROWSERS = 50
NUM_SILENT = 20
SETTLE_S = 0.5


@contextmanager
def page(*, hz: float) -> Iterator[tuple[str, psutil.Process]]:
    """The page of this process's run: its address, and its server."""
    command = [sys.executable, "-m", "flatout", "watch", "--web", "--pid", str(os.getpid()), "--hz", str(hz)]
    with (
        TemporaryDirectory() as folder,
        subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as server,
    ):
        try:
            yield _address(server), psutil.Process(server.pid)
        finally:
            server.terminate()


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    said = ""
    for line in server.stderr:
        said += line
        address = next((word for word in line.split() if word.startswith("http://")), None)
        if address is not None:
            return address
    raise SystemExit(f"the page did not start: {said.strip()}")


@contextmanager
def browsing(
    address: str, *, num: int, silent: int, seconds: float
) -> Iterator[Callable[[], dict[str, Any]]]:
    """Browsers for some seconds; what they saw is told when they have left."""
    command = [sys.executable, str(BROWSERS), address, "--num", str(num), "--silent", str(silent)]
    with subprocess.Popen(
        [*command, "--seconds", str(seconds)], stdout=subprocess.PIPE, text=True
    ) as browsers:
        assert browsers.stdout is not None
        output = browsers.stdout
        yield lambda: dict(json.loads(output.read()))


def measure_load(step: Step, *, device: str, rounds: int, block_s: float) -> dict[str, Any]:
    """Step time of a watched job with fifty browsers on its page, over that without, and over unwatched."""
    watched = partial(flatout, hz=1.0, device=device)
    times: dict[str, list[float]] = {"off": [], "alone": [], "page": [], "browsers": []}
    seen: list[dict[str, Any]] = []
    for _ in range(rounds):
        with off(step) as plain:
            times["off"].append(_mean_step_s(plain, block_s))
        with watched(step) as reported:
            reported()
            times["alone"].append(_mean_step_s(reported, block_s))
            with page(hz=1.0) as (address, _):
                times["page"].append(_mean_step_s(reported, block_s))
                with browsing(address, num=NUM_BROWSERS, silent=1, seconds=block_s + SETTLE_S) as result:
                    _mean_step_s(reported, SETTLE_S)  # all have connected
                    times["browsers"].append(_mean_step_s(reported, block_s))
                    seen.append(result())
    return {
        "browsers": NUM_BROWSERS,
        "block_s": block_s,
        "browsers over page": ratio(times["browsers"], times["page"]),
        "browsers over watched": ratio(times["browsers"], times["alone"]),
        "browsers over off": ratio(times["browsers"], times["off"]),
        "fewest_samples": min(each["fewest_samples"] for each in seen),
        "median_gap_s": sorted(each["median_gap_s"] for each in seen)[len(seen) // 2],
        "longest_gap_s": max(each["longest_gap_s"] for each in seen),
    }


def measure_silent(step: Step, *, device: str, seconds: float) -> dict[str, Any]:
    """Memory of the server at ten samples a second: one browser that reads, then many that never do."""
    watched = partial(flatout, hz=1.0, device=device)
    with watched(step) as reported, page(hz=10.0) as (address, server):
        reported()
        grown = []
        for num, silent in ((1, 0), (0, NUM_SILENT)):
            with browsing(address, num=num, silent=silent, seconds=seconds) as result:
                _mean_step_s(reported, SETTLE_S)
                before = server.memory_info().rss
                _mean_step_s(reported, seconds - 2 * SETTLE_S)
                grown.append(server.memory_info().rss - before)
                result()
        return {
            "seconds": seconds,
            "samples_per_s": 10.0,
            "silent_browsers": NUM_SILENT,
            "grown_bytes_with_a_reader": grown[0],
            "grown_bytes_with_silent": grown[1],
            "rss_bytes": server.memory_info().rss,
        }


def _mean_step_s(step: Step, seconds: float) -> float:
    _finish()
    num, start = 0, time.perf_counter()
    while num < 3 or time.perf_counter() - start < seconds:
        step()
        num += 1
    _finish()
    return (time.perf_counter() - start) / num


def _finish() -> None:
    """A GPU runs behind the host."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
