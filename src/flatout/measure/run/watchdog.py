"""Give up on a block of steps that hangs.

A loop may wait for something that an arm removes.  After a while the arm is told to let the code run
unchanged.  That does not free a thread that waits for another one, so after as long again the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Watchdog:
    """Watches one block at a time."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def watch(self, *, longest_s: float, on_late: Callable[[], None], on_stuck: Callable[[], None]) -> None:
        """Call `on_late` after `longest_s` and `on_stuck` after as long again, unless `end` comes first."""
        self._ended = threading.Event()
        arguments = (self._ended, longest_s, on_late, on_stuck)
        threading.Thread(target=_wait, args=arguments, name="flatout-watchdog", daemon=True).start()

    def end(self) -> None:
        self._ended.set()


def _wait(
    ended: threading.Event, longest_s: float, on_late: Callable[[], None], on_stuck: Callable[[], None]
) -> None:
    if ended.wait(longest_s):
        return
    on_late()
    if not ended.wait(longest_s):
        on_stuck()
