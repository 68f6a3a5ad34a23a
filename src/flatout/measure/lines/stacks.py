"""Which lines of the user's code the training thread is in, by looking at its stack many times a second.

Counting operators names lines that call torch; a log loop, a queue or a simulator calls none and shows only
as time of the step that no phase explains.  A second thread looks at the training thread's stack at uneven
intervals and notes the phase it is in and the user's lines on its stack, outermost first.

A look needs the interpreter's lock.  Lines that let go of it (torch's operators) would be seen sooner than
lines that hold it (Python's own loops), so meanwhile a thread that asks for it gets it within 0.1 ms instead
of 5.  That slows the job, so the steps of this pass are never timed.
"""

from __future__ import annotations

import ast
import functools
import random
import sys
import threading
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from flatout.measure import PHASES
from flatout.measure.clock import EXCLUDED
from flatout.measure.evidence import Place, StackPath, Stacks

if TYPE_CHECKING:
    from flatout.measure.clock import Clock
    from flatout.measure.user_code import UserCode

INTERVAL_S = 0.001
SWITCH_INTERVAL_S = 1e-4
DEEPEST = 12  # of the user's lines on a stack, from the outermost
MOST_PATHS = 200


@functools.lru_cache(maxsize=256)
def loop_spans(path: str) -> tuple[tuple[int, int], ...]:
    """(first line, last line) of every loop of a source file, outer loops first."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    loops = (node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.AsyncFor, ast.While)))
    return tuple(sorted((node.lineno, node.end_lineno or node.lineno) for node in loops))


class StackSampler:
    """Looks at the training thread from `start` to `stop`."""

    def __init__(self, clock: Clock, user_code: UserCode) -> None:
        self._clock, self._user_code = clock, user_code
        self._found: Counter[tuple[int, tuple[Place, ...]]] = Counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_around, name="flatout-stacks", daemon=True)
        self.failure: Exception | None = None

    def start(self) -> None:
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    def stop(self, *, num_steps: int, differentiable: Collection[Place] = ()) -> Stacks:
        """What was seen; `differentiable` are lines that are known to compute the loss."""
        self._ended.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_interval_s)
        if self.failure is not None:
            raise self.failure
        by_phase: Counter[str] = Counter()
        for (region, _), num in self._found.items():
            by_phase[PHASES[region]] += num
        paths = tuple(
            StackPath(phase=PHASES[region], places=places, samples=num)
            for (region, places), num in self._found.most_common(MOST_PATHS)
        )
        places = dict.fromkeys(place for path in paths for place in path.places)
        loops = {str(place): self._loops_around(place) for place in places}
        return Stacks(
            num_steps=num_steps,
            samples_by_phase=dict(by_phase),
            paths=paths,
            loops={line: headers for line, headers in loops.items() if headers},
            differentiable=tuple(place for place in places if place in differentiable),
        )

    def _loops_around(self, place: Place) -> tuple[int, ...]:
        spans = loop_spans(self._user_code.path(place.file))
        return tuple(first for first, last in spans if first <= place.line <= last)

    def _look_around(self) -> None:
        uneven = random.Random(0)  # even intervals would beat with the steps
        while not self._ended.wait(INTERVAL_S * uneven.uniform(0.5, 1.5)):
            try:
                changed_at = self._clock.last
                region, frame = self._clock.stack[-1], sys._current_frames().get(self._clock.owner)
                if self._clock.last == changed_at:  # else the thread went on between the two
                    self._look(region, frame)
                del frame  # it would keep the variables of a function alive that has ended
            except Exception as error:  # noqa: BLE001 - ours; the job goes on without this instrument
                self.failure = error
                return

    def _look(self, region: int, frame: FrameType | None) -> None:
        if frame is None or region == EXCLUDED:
            return
        places: list[Place] = []
        while frame is not None:
            if self._user_code.is_user(frame.f_code):
                places.append(self._user_code.place_in(frame.f_code, line=frame.f_lineno))
            frame = frame.f_back
        self._found[region, tuple(places[::-1][:DEEPEST])] += 1
