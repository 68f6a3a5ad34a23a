"""Ctrl-C and SIGTERM, delivered at moments when the work is consistent.

An update touches every weight; ended in its middle it would leave a model that is neither the one before nor
the one after.  There are two ways to wait for a consistent moment:

    with Interrupts() as interrupts:                    # raised at once, except in held blocks
        with interrupts.held():
            update()

    with Interrupts(ask=True) as interrupts:            # only noted: the loop asks at the end of a step
        while not interrupts.came:
            step()

A loop that asks may hang; a second signal is raised at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which goes to this process alone, or a lost terminal; Ctrl-C goes to the whole group."""


class Interrupts:
    """SIGINT and SIGTERM inside `with`, in the main thread; elsewhere nothing is installed."""

    def __init__(self, *, ask: bool = False, hold: bool = False, hangup: bool = False) -> None:
        """Let the owner read `came` with `ask`; with `hold`, raise nothing before the first `release`.

        With `hangup`, SIGHUP (the terminal ends) is an interrupt too, unless it is ignored, as under nohup.
        """
        self._ask = ask
        self._hangup = hangup
        self._holding = ask or hold
        self._number: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def came(self) -> bool:
        """Whether a signal is waiting."""
        return self._number is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if self._hangup and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if self.came and error is None and not self._ask:
            self.release()

    def hold(self) -> None:
        """Put interrupts off until `release`."""
        self._holding = True

    def release(self) -> None:
        """Raise what came in the meantime, and from here on whatever comes."""
        self._holding = False
        if self._number is not None:
            number, self._number = self._number, None
            raise _interrupt(number)

    def take(self) -> bool:
        """Return whether a signal came while interrupts were put off: the owner ends the work."""
        came, self._number = self.came, None
        return came

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Put interrupts off to the end of the block; an error in it comes first."""
        self.hold()
        try:
            yield
        finally:
            self._holding = False
        self.release()

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if not self._holding or (self._ask and self.came):
            raise _interrupt(number)
        self._number = number


def end_with_parent() -> None:
    """Let this process get SIGTERM when the process that started it is gone; Linux alone can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def _interrupt(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()
