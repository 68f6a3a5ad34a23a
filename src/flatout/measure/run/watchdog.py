"""Give up on a block of steps that hangs.

A loop may wait for something that an arm removes.  After a while the arm is told to let the code run
unchanged.  That does not free a thread that waits for another one, so after as long again the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from flatout.measure.clock import now
from flatout.measure.process.own_thread import OwnThread


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
