"""What may watch a job, each as a context manager that gives the step as it runs under it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flatout.monitor.job import watch

Step = Callable[[], None]
Arm = Callable[[Step], AbstractContextManager[Step]]


@contextmanager
def off(step: Step) -> Iterator[Step]:
    yield step


@contextmanager
def flatout(step: Step, *, hz: float) -> Iterator[Step]:
    """Reported as a loop that waits for nothing and computes in its step."""
    with TemporaryDirectory() as folder, watch(line=False, hz=hz, folder=Path(folder)) as watched:

        def reported() -> None:
            with watched.phase("wait"):
                pass
            step()
            watched.step(loss=0.5, lr=0.001)

        yield reported


@contextmanager
def nvitop(step: Step) -> Iterator[Step]:
    module: Any = importlib.import_module("nvitop")
    collector = module.ResourceMetricCollector(interval=1.0)
    collector.daemonize(on_collect=lambda metrics: True, interval=1.0)
    collector.start(tag="benchmark")
    try:
        yield step
    finally:
        collector.stop()


@contextmanager
def codecarbon(step: Step) -> Iterator[Step]:
    module: Any = importlib.import_module("codecarbon")
    logging.getLogger("codecarbon").setLevel(logging.CRITICAL)
    tracker = module.OfflineEmissionsTracker(
        country_iso_code="USA", measure_power_secs=1, save_to_file=False, log_level="critical"
    )
    tracker.start()
    try:
        yield step
    finally:
        tracker.stop()


def arms() -> tuple[dict[str, Arm], list[str]]:
    """The arms that can run here, and the names of those that are not installed."""
    found: dict[str, Arm] = {"off": off, "1 Hz": partial(flatout, hz=1.0), "10 Hz": partial(flatout, hz=10.0)}
    absent = []
    peers: dict[str, Arm] = {"nvitop": nvitop, "codecarbon": codecarbon}
    for name, arm in peers.items():
        if importlib.util.find_spec(name) is None:
            absent.append(name)
        else:
            found[name] = arm
    if importlib.util.find_spec("traceml_ai") is None:
        absent.append("traceml-ai")
    return found, absent
