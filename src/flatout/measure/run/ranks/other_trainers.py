"""Processes that the script starts and that train on their own: A3C, or `torch.multiprocessing.spawn`.

Only the script itself is watched. A forked process lets it know by a byte of shared memory that it trains, so
that nobody waits for a first step that will not come.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import resource
import sys
from typing import Any

import psutil

from flatout.ground.units import show_seconds

UNWATCHED = "processes that the script started"
WATCH_THEM = (
    "let the script itself call what one of them runs, and diagnose that; "
    "torchrun -m flatout diagnose watches every rank it starts"
)
LEAST_S = 1.0


class OtherTrainers:
    """Knows whether a process that this one forked has trained."""

    def __init__(self) -> None:
        self._has_trained = mmap.mmap(-1, 1)  # shared with forked processes

    @property
    def trains(self) -> bool:
        return self._has_trained[0] == 1

    def watch(self) -> None:
        """Note the first optimizer step of this process, which was forked."""
        optimizers: Any = sys.modules.get("torch.optim.optimizer")
        if optimizers is None:
            return

        def note(*_: Any) -> None:
            self._has_trained[0] = 1
            handle.remove()

        handle = optimizers.register_optimizer_step_post_hook(note)


def describe_other_trainers(*, ended: bool) -> str | None:
    """Say how long processes computed to which a script that took no step itself may have left the work.

    `ended`: the script came to its own end, so all of its processes count. While it waits, only those do that
    it started to work beside it, not workers of a pool or a loader, or a compiler.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # processes that have ended
    cpu_s = used.ru_utime + used.ru_stime if ended else 0.0
    for child in multiprocessing.active_children():
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(child.pid).cpu_times()
            cpu_s += 0.0 if child.daemon else times.user + times.system
    if cpu_s < LEAST_S:
        return None
    return f"{UNWATCHED} computed for {show_seconds(cpu_s)}, and only the script itself is watched"
