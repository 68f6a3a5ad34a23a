"""A monitor in a process that does nothing else: its first sample, its CPU time, its memory.

    python benchmarks/monitor/alone.py flatout --hz 1 --seconds 20

The clock starts before the first import, because whoever waits for a first sample waits for that too.
"""

from __future__ import annotations

import time

STARTED_S = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

FIRST_WITHIN_S = 20.0
STARTS = 5


def flatout(hz: float, on_sample: Callable[[], None]) -> Callable[[], None]:
    from flatout.monitor.sampler import Sampler

    sampler = Sampler(hz=hz, listeners=[lambda sample: on_sample()])
    sampler.start()
    return sampler.stop


def nvitop(hz: float, on_sample: Callable[[], None]) -> Callable[[], None]:
    from nvitop import collect_in_background

    is_over = threading.Event()

    def on_collect(metrics: Any) -> bool:
        on_sample()
        return not is_over.is_set()

    collect_in_background(on_collect, interval=1 / hz)
    return is_over.set


def codecarbon(hz: float, on_sample: Callable[[], None]) -> Callable[[], None]:
    from codecarbon import OfflineEmissionsTracker

    tracker = OfflineEmissionsTracker(
        country_iso_code="USA",
        measure_power_secs=1 / hz,
        save_to_file=False,
        log_level="critical",
        allow_multiple_runs=True,
    )
    tracker.start()
    on_sample()  # it reads once before it returns, and has no callback
    return lambda: tracker.stop() and None


MONITORS = {"flatout": flatout, "nvitop": nvitop, "codecarbon": codecarbon}


def measure(name: str, *, hz: float, seconds: float) -> dict[str, Any]:
    first = threading.Event()
    stop = MONITORS[name](hz, first.set)
    if not first.wait(FIRST_WITHIN_S):
        raise SystemExit(f"{name} took no sample in {FIRST_WITHIN_S:g} s")
    first_s = time.perf_counter() - STARTED_S
    start, start_cpu = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    used_s, span_s = time.process_time() - start_cpu, time.perf_counter() - start
    import psutil

    rss_bytes = psutil.Process().memory_info().rss
    stop()
    return {"first_sample_s": first_s, "cpu_share_of_a_core": used_s / span_s, "rss_bytes": rss_bytes}


def run_alone(name: str, *, hz: float, seconds: float) -> dict[str, Any] | None:
    """`measure` in a process of its own, its first sample as the median of starts; None where it fails."""
    found = _run(name, hz=hz, seconds=seconds)
    again = [_run(name, hz=hz, seconds=0.05) for _ in range(STARTS - 1)]
    if found is not None:
        starts = [found, *(each for each in again if each is not None)]
        found["first_sample_s"] = statistics.median(each["first_sample_s"] for each in starts)
        found["starts"] = len(starts)
    return found


def _run(name: str, *, hz: float, seconds: float) -> dict[str, Any] | None:
    """None, with its last words on stderr, where it fails."""
    command = [sys.executable, str(Path(__file__)), name, "--hz", str(hz), "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 60)
    if done.returncode:
        print(f"{name} alone: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=list(MONITORS))
    parser.add_argument("--hz", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    print(json.dumps(measure(options.name, hz=options.hz, seconds=options.seconds)))
