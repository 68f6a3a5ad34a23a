"""Ctrl-C and a polite kill, at moments when the run is whole.

An update touches every weight; ended in its middle it would leave a model that is neither the one before nor
the one after.  `held` puts an interrupt off until the block is over.  Everywhere else it ends the work at
once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """SIGINT and SIGTERM as KeyboardInterrupt, between `held` blocks; active inside `with`."""

    def __init__(self) -> None:
        self._holding = False
        self._came = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Put interrupts off to the end of the block."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._came:
            self._came = False
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self._holding:
            raise KeyboardInterrupt
        self._came = True
