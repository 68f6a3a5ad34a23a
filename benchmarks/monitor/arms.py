"""What may watch a job, each as a context manager that gives the step as it runs under it."""

from __future__ import annotations

import importlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flatout.monitor.job.watch import watch

Step = Callable[[], None]
Arm = Callable[[Step], AbstractContextManager[Step]]


@contextmanager
def off(step: Step) -> Iterator[Step]:
    yield step


@contextmanager
def flatout(step: Step, *, hz: float, device: str) -> Iterator[Step]:
    """All that a watched loop does: batches handed out, waits timed on both clocks, a loss of the device."""
    loss = torch.full((), 0.5, device=device)
    with TemporaryDirectory() as folder:
        watched = watch(itertools.repeat(None), line=False, hz=hz, folder=Path(folder))
        with watched:
            batches = iter(watched)

            def reported() -> None:
                next(batches)
                step()
                watched.step(loss=loss, lr=0.001)

            yield reported


@contextmanager
def nvitop(step: Step) -> Iterator[Step]:
    module: Any = importlib.import_module("nvitop")
    is_over = threading.Event()
    daemon = module.collect_in_background(lambda metrics: not is_over.is_set(), interval=1.0)
    try:
        yield step
    finally:
        is_over.set()
        daemon.join(timeout=5.0)  # it notices at its next collection; the arm that follows must be alone


@contextmanager
def codecarbon(step: Step) -> Iterator[Step]:
    module: Any = importlib.import_module("codecarbon")
    logging.getLogger("codecarbon").setLevel(logging.CRITICAL)
    tracker = module.OfflineEmissionsTracker(
        country_iso_code="USA",
        measure_power_secs=1,
        save_to_file=False,
        log_level="critical",
        allow_multiple_runs=True,
    )
    tracker.start()
    try:
        yield step
    finally:
        tracker.stop()


PEERS: dict[str, Arm] = {"nvitop": nvitop, "codecarbon": codecarbon}


def arms(device: str) -> tuple[dict[str, Arm], dict[str, str]]:
    """The arms that can run here, and why each of the others cannot."""
    found: dict[str, Arm] = {"off": off}
    found |= {f"{hz:g} Hz": partial(flatout, hz=hz, device=device) for hz in (1.0, 10.0)}
    absent: dict[str, str] = {}
    for name, arm in PEERS.items():
        try:
            importlib.import_module(name)
        except ImportError as error:
            absent[name] = str(error)
        else:
            found[name] = arm
    return found, absent
