"""Keys of a terminal, one by one and without echo; the terminal is put back whatever happens.

One wait serves everything a view has to react to: a key, a sample that was taken in another thread, a
signal, a deadline.  Signals are only noted here, and the view acts on them between two frames: an exception
thrown into the middle of drawing would leave half an escape sequence on the screen.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from types import FrameType
from typing import Any

NAMES = {
    b"\t": "next",
    b"\x1b[C": "next",
    b"\x1b[B": "next",
    b"\x1b[Z": "previous",
    b"\x1b[D": "previous",
    b"\x1b[A": "previous",
    b"\x1bOC": "next",  # what some terminals send instead
    b"\x1bOB": "next",
    b"\x1bOD": "previous",
    b"\x1bOA": "previous",
    b"\x1b": "escape",
    b"\x03": "interrupt",
    b" ": "space",
}
# ESC [ parameters final, ESC O letter, a character of one or several bytes.
KEY = re.compile(rb"\x1b\[[^@-~]*[@-~]?|\x1bO.|[\xc0-\xff][\x80-\xbf]*|.", flags=re.DOTALL)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)


class Keyboard:
    """The keys of a terminal while it is open; with None there are none, but waits and signals still work."""

    def __init__(self, terminal: int | None) -> None:
        self.signals: list[int] = []  # that came since they were last looked at
        self._terminal = terminal
        self._before: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._wakeup_before = -1
        self._woken, self._wake = -1, -1

    def __enter__(self) -> Keyboard:
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        self._wakeup_before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in SIGNALS:
            self._handlers[number] = signal.signal(number, self._note)
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        wake, self._wake = self._wake, -1
        os.close(self._woken)
        os.close(wake)

    def take(self) -> None:
        """Switch off echo and line buffering; Ctrl-C and Ctrl-Z still send their signals."""
        if self._terminal is not None and self._before is None:
            self._before = termios.tcgetattr(self._terminal)
            tty.setcbreak(self._terminal, termios.TCSADRAIN)

    def give_back(self) -> None:
        if self._terminal is not None and self._before is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)
            self._before = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)

    def wake(self) -> None:
        """End the current wait; callable from any thread."""
        if self._wake >= 0:
            with contextlib.suppress(OSError):  # the pipe is full: it will wake up anyway
                os.write(self._wake, b"\0")

    def wait(self, timeout_s: float | None = None) -> list[str]:
        """Wait for keys and return them; empty if something else ended the wait."""
        watched = [self._woken] + ([] if self._before is None or self._terminal is None else [self._terminal])
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        if self._terminal not in ready or self._terminal is None:
            return []
        try:
            data = os.read(self._terminal, 256)
        except OSError:
            data = b""
        if not data:  # a terminal that hung up is ready for ever
            self.signals.append(signal.SIGHUP)
        return names_of(data)


def names_of(data: bytes) -> list[str]:
    """Translate bytes into key names; drop unknown sequences whole."""
    keys = []
    for one in KEY.findall(data):
        text = NAMES.get(one) or ("" if one.startswith(b"\x1b") else one.decode(errors="ignore"))
        if text and text.isprintable():
            keys.append(text)
    return keys


def standard_input() -> int | None:
    """Return the terminal's descriptor if this process may read keys from it."""
    try:
        number = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    # A process in the background that changed the terminal would be stopped for it.
    return number if os.isatty(number) and os.tcgetpgrp(number) == os.getpgrp() else None
