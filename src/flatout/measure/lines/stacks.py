"""Which lines of the user's code the training thread is in, by looking at its stack many times a second.

Counting operators names lines that call torch; a log loop, a queue or a simulator calls none and shows only as
time of the step that no phase explains.  A second thread looks at the training thread's stack at uneven
intervals and notes the phase it is in and the user's lines on its stack, outermost first.  Each look takes the
interpreter's lock for some ten microseconds, so the steps of this pass are never timed.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from types import FrameType
from typing import TYPE_CHECKING

from flatout.measure import PHASES
from flatout.measure.clock import EXCLUDED
from flatout.measure.evidence import Place, StackPath, Stacks

if TYPE_CHECKING:
    from flatout.measure.clock import Clock
    from flatout.measure.user_code import UserCode

INTERVAL_S = 0.003
DEEPEST = 12  # of the user's lines on a stack, from the outermost
MOST_PATHS = 200


class StackSampler:
    """Looks at the training thread from `start` to `stop`."""

    def __init__(self, clock: Clock, user_code: UserCode) -> None:
        self._clock, self._user_code = clock, user_code
        self._found: Counter[tuple[int, tuple[Place, ...]]] = Counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_around, name="flatout-stacks", daemon=True)
        self.failure: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, num_steps: int) -> Stacks:
        self._ended.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure
        by_phase: Counter[str] = Counter()
        for (region, _), num in self._found.items():
            by_phase[PHASES[region]] += num
        return Stacks(
            num_steps=num_steps,
            samples_by_phase=dict(by_phase),
            paths=tuple(
                StackPath(phase=PHASES[region], places=places, samples=num)
                for (region, places), num in self._found.most_common(MOST_PATHS)
            ),
        )

    def _look_around(self) -> None:
        uneven = random.Random(0)  # noqa: S311 - even intervals would beat with the steps
        while not self._ended.wait(INTERVAL_S * uneven.uniform(0.5, 1.5)):
            try:
                self._look(sys._current_frames().get(self._clock.owner))
            except Exception as error:  # noqa: BLE001 - ours; the job goes on without this instrument
                self.failure = error
                return

    def _look(self, frame: FrameType | None) -> None:
        region = self._clock.stack[-1]
        if frame is None or region == EXCLUDED:
            return
        places: list[Place] = []
        while frame is not None:
            if self._user_code.is_user(frame.f_code):
                places.append(self._user_code.place_in(frame.f_code, line=frame.f_lineno))
            frame = frame.f_back
        self._found[region, tuple(places[::-1][:DEEPEST])] += 1
