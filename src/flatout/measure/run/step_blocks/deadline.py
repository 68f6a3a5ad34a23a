"""How long a diagnosis may take, and each block of its steps.

The time counts from the command's start, imports and set-up included, but the steps get some of it however
long these took.  A step under way at the end may still come to its end: an instrument slows it tenfold, and
an evaluation takes longer than any step.  Once it is overdue, the diagnosis ends inside it.

A block may hang: a loop may wait for something that an arm removes.  After a while the arm is told to let the
code run unchanged.  That does not free a thread that waits for another one, so after as long again the
process ends.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable

from flatout.measure.clock import now
from flatout.measure.process.own_thread import OwnThread
from flatout.measure.run.lineage import LEAST_SET_UP_S, OVERDUE_S

LEAST_STEPS_S = 5.0  # from the first step on, or the whole time if that is shorter
OVERDUE = 20  # typical steps, for the one under way when the time is up
LEAST_NEWS_S = 1.0  # between two announcements of the end


class Deadline:
    """The end of one diagnosis, on the monotonic clock."""

    def __init__(self, seconds: float, *, began_s: float | None) -> None:
        """Begin at `began_s`, or at this moment."""
        self.seconds = seconds
        self.began_s = time.monotonic() if began_s is None else began_s
        self.ends_s = self.began_s + seconds
        self.first_step_s: float | None = None  # when the first step ended
        self._announced_s = 0.0  # when the job was last said to be overdue

    @property
    def seconds_left(self) -> float:
        return self.ends_s - time.monotonic()

    @property
    def set_up_s(self) -> float:
        """How long imports and set-up took; 0 until a step ended."""
        return 0.0 if self.first_step_s is None else self.first_step_s - self.began_s

    def note_first_step(self) -> None:
        """Leave the steps some time, however long the imports took."""
        self.first_step_s = time.monotonic()
        self.ends_s = max(self.ends_s, self.first_step_s + min(LEAST_STEPS_S, self.seconds))

    def due_s(
        self, steps_s: Iterable[float], *, step_began_s: float, trains_elsewhere: bool = False
    ) -> float:
        """Return when the step under way, which began at `step_began_s` of the job's clock, is overdue.

        `steps_s` are the job's steps, read only once the time is up. A job that has processes of its own for
        training takes no step, however long its set-up.
        """
        if self.first_step_s is None:
            set_up_s = 0.0 if trains_elsewhere else LEAST_SET_UP_S
            return self.began_s + max(self.seconds, set_up_s) + OVERDUE_S
        if self.seconds_left > 0:
            return self.ends_s + OVERDUE_S
        usual_s = statistics.median([*steps_s] or [0.0])
        began_s = time.monotonic() - (now() - step_began_s)
        return max(self.ends_s + OVERDUE_S, began_s + OVERDUE * usual_s)

    def is_news(self, due_s: float) -> bool:
        """Return whether `due_s` differs from what was announced, and count it as announced."""
        differs = abs(due_s - self._announced_s) > LEAST_NEWS_S
        if differs:
            self._announced_s = due_s
        return differs


class Watchdog:
    """Watches one block at a time."""

    def __init__(self) -> None:
        self._thread: OwnThread | None = None

    def watch(self, *, longest_s: float, on_late: Callable[[], None], on_stuck: Callable[[], None]) -> None:
        """Call `on_late` after `longest_s` and `on_stuck` after as long again, unless `end` comes first."""
        start_s = now()
        due = [(start_s + longest_s, on_late), (start_s + 2 * longest_s, on_stuck)]

        def wait(leave: threading.Event) -> None:
            while due and not leave.wait(max(0.0, due[0][0] - now())):
                due.pop(0)[1]()

        self._thread = OwnThread(wait, name="flatout-watchdog")
        self._thread.start()

    def end(self) -> None:
        if self._thread is not None:
            self._thread.stop()
