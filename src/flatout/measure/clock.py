"""Exclusive time per phase on the training thread, and the same phases on the GPU's own clock.

The host side is a stack: entering a region charges the time since the last change to the region on top, so
nested regions never count twice and time that no region claims is "rest".  The device side is a list of CUDA
events recorded at the same borders and read only after the measurement: recording never waits for the GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

from flatout.measure import PHASES

WAIT, TRANSFER, FORWARD, BACKWARD, OPTIMIZER, REST, EXCLUDED = range(7)
NUM_REGIONS = 7
MAX_MARKS_PER_STEP = 64

now = time.perf_counter
ident = threading.get_ident


class Clock:
    """Seconds per region since the last `restart`; times only the owner's thread."""

    __slots__ = ("last", "marks", "owner", "stack", "totals")

    def __init__(self) -> None:
        self.owner = ident()
        self.marks: DeviceMarks | None = None  # only with a GPU
        self.restart()

    def restart(self) -> None:
        self.totals = [0.0] * NUM_REGIONS
        self.stack = [REST]
        self.last = now()

    def enter(self, region: int) -> None:
        time_s = now()
        self.totals[self.stack[-1]] += time_s - self.last
        self.last = time_s
        self.stack.append(region)

    def leave(self) -> float:
        """End the innermost region and return the seconds since the last change."""
        time_s = now()
        spent_s = time_s - self.last
        self.totals[self.stack.pop()] += spent_s
        self.last = time_s
        return spent_s

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude Flatout's own work from every step, along with the time the GPU idles meanwhile."""
        self.enter(EXCLUDED)
        if self.marks is not None:
            self.marks.mark(EXCLUDED, always=True)
        try:
            yield
        finally:
            self.leave()
            if self.marks is not None:
                self.marks.mark(REST, always=True)

    def book_out(self, spent_s: float) -> None:
        """Take `spent_s` off the current region: it was Flatout's own work."""
        self.totals[self.stack[-1]] -= spent_s
        self.totals[EXCLUDED] += spent_s

    def take(self) -> list[float]:
        """Return the totals so far and count from zero again; the stack stays."""
        time_s = now()
        self.totals[self.stack[-1]] += time_s - self.last
        self.last = time_s
        totals, self.totals = self.totals, [0.0] * NUM_REGIONS
        return totals


def phases_s(totals: list[float]) -> dict[str, float]:
    return {phase: totals[region] for region, phase in enumerate(PHASES)}


class DeviceMarks:
    """CUDA events at phase borders; a step's marks are read once all of them have happened."""

    def __init__(self) -> None:
        import torch

        self._event: Any = torch.cuda.Event
        self._pending: list[tuple[int, Any]] = []
        self.detailed = True  # False: only the ends of steps are marked

    def mark(self, region: int, *, always: bool = False) -> None:
        """Charge the stream's work to `region` from here on."""
        if always or (self.detailed and len(self._pending) < MAX_MARKS_PER_STEP):
            event = self._event(enable_timing=True)
            event.record()
            self._pending.append((region, event))

    def take(self) -> list[tuple[int, Any]]:
        """End the step and return its marks, the last one at its end."""
        event = self._event(enable_timing=True)
        event.record()
        marks = [*self._pending, (REST, event)]
        self._pending = [(REST, event)]
        return marks

    def restart(self) -> None:
        """Start the next step here instead of at the end of the last one."""
        event = self._event(enable_timing=True)
        event.record()
        self._pending = [(REST, event)]


def read_marks(marks: list[tuple[int, Any]]) -> tuple[float, dict[str, float] | None] | None:
    """Return (step seconds, seconds per phase) by the device's clock; None until the GPU reaches all marks.

    The step excludes Flatout's own work.  A step with marks only at its ends has no phases.
    """
    if not marks or not marks[-1][1].query():
        return None
    totals = [0.0] * NUM_REGIONS
    for (region, start), (_next, end) in itertools.pairwise(marks):
        totals[region] += start.elapsed_time(end) / 1e3
    detailed = any(region not in (REST, EXCLUDED) for region, _ in marks)
    return sum(totals) - totals[EXCLUDED], phases_s(totals) if detailed else None
