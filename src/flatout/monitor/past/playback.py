"""A run's log played again, at its own pace or faster.

The pace is that of the samples' own times.  Hours that only the coarse tiers of the log still hold pass as
quickly as the others: a sample that stands for an hour is due an hour after the one before it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from flatout.ground.errors import BadInput
from flatout.monitor.sample import Sample, drop_older
from flatout.monitor.sampler import RECENT_S

MOST_AT_ONCE = 1000  # a very fast replay still draws a frame now and then
LONGEST_PAUSE_S = 2.0  # on the wall, however long the run has no samples


class Playback:
    """Samples that become due; `advance` takes in those that are."""

    def __init__(
        self,
        samples: Iterable[Sample],
        *,
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (speed > 0 and math.isfinite(speed)):
            raise BadInput(f"--speed {speed:g} is not above 0", hint="60 plays a minute per second")
        self._coming: Iterator[Sample] = iter(samples)
        self._next = next(self._coming, None)
        if self._next is None:
            raise BadInput("the run has no samples", hint="it ended before the first sample")
        self._speed, self._clock = speed, clock
        self._due_s = clock()
        self._recent: deque[Sample] = deque()

    @property
    def is_over(self) -> bool:
        return self._next is None

    @property
    def wait_s(self) -> float | None:
        """How long until the next sample is due; None after the last."""
        return None if self._next is None else max(self._due_s - self._clock(), 0.0)

    def advance(self) -> list[Sample]:
        """Return the samples that have become due since the last call."""
        now_s = self._clock()
        if now_s - self._due_s > LONGEST_PAUSE_S:
            self._due_s = now_s  # the picture was held: what was missed is not made up for
        due = []
        while self._next is not None and self._due_s <= now_s:
            shown = self._next
            due.append(shown)
            self._recent.append(shown)
            self._next = next(self._coming, None)
            if self._next is not None:
                passed_s = max(self._next.time_s - shown.time_s, 0.0) / self._speed
                self._due_s += min(passed_s, LONGEST_PAUSE_S)
            if len(due) >= MOST_AT_ONCE:
                break
        drop_older(self._recent, RECENT_S)
        return due

    def recent(self) -> tuple[Sample, ...]:
        return tuple(self._recent)
