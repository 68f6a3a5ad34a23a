"""One line below whatever a job writes to its terminal, which gets out of the way.

The streams of the job stay the same objects: only their `write` is replaced.  Before the job's text goes out
the line is wiped, and after it the line is drawn again, so that it is always there and never part of the
text.  It stands on the cursor's row if that is empty, below a row that the job draws again and again ("\\r50
%"), and below the bars of tqdm, whose lock says when tqdm moves the cursor.  It disappears while a row is
unfinished, while the terminal is read (`input`, a debugger, a password), and while the shell has the job in
the background.

Texts of other processes and of libraries in C are not heard: they are appended to the line.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import os
import re
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

CLEAR_LINE = "\r\x1b[K"
MOST_KEPT = 1000  # characters of a row
ASK_EVERY_S = 0.1  # whether the terminal is taken
TOKENS = re.compile(r"\r|\x1b\[([0-9;?]*)([@-~])|[^\r\x1b]+|\x1b")
MOVES = "ABEFHJLMSTdf"  # to another row
HIDDEN_FROM = 20  # tqdm draws no bars below this row


class Row:
    """What the job has on the cursor's row."""

    def __init__(self) -> None:
        self.is_redrawn = False  # the job went back to its start
        self._text = ""
        self._column = 0

    @property
    def is_free(self) -> bool:
        """Whether the row is empty and the cursor is at its start."""
        return not self._column and not self._text.strip()

    def clear(self) -> None:
        self.is_redrawn = False
        self._text, self._column = "", 0

    def take(self, text: str) -> None:
        """Follow the cursor through a text that the job writes."""
        _, newline, rest = text.rpartition("\n")
        if newline:
            self.clear()
        if "\r" not in rest and "\x1b" not in rest:  # as nearly always
            self._put(rest)
            return
        for token in TOKENS.finditer(rest):
            if token[0] == "\r":
                self._column, self.is_redrawn = 0, True
            elif token[2] == "K":
                self._text = self._text[: self._column] if token[1] in ("", "0") else ""
            elif token[2] is not None and token[2] in MOVES:  # what stands there is not known
                self._text, self.is_redrawn = "?", False
            elif token[2] is None and token[0] != "\x1b":
                self._put(token[0])

    def _put(self, text: str) -> None:
        end = self._column + len(text)
        before, after = self._text[: self._column], self._text[end:]
        self._text = (before.ljust(self._column) + text + after)[:MOST_KEPT]
        self._column = min(end, MOST_KEPT)


class HookedLock:
    """tqdm's lock; `before` and `after` are called within it."""

    def __init__(self, own: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.own, self._before, self._after = own, before, after

    def acquire(self, *arguments: Any, **options: Any) -> Any:
        got = self.own.acquire(*arguments, **options)
        if got is not False:  # tqdm's own lock answers None
            self._before()
        return got

    def release(self) -> None:
        self._after()
        self.own.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __reduce__(self) -> Any:  # workers are given the lock itself
        return _same, (self.own,)


def _same(lock: Any) -> Any:
    return lock


class StandingLine:
    """The line: `show` it, `say` something above it, `close` it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may print in the middle of a print
        self._pid = os.getpid()
        self._stream: TextIO | None = None
        self._text = ""
        self._rows_down: int | None = None  # below the cursor; None: it does not stand
        self._row = Row()
        self._num_busy = 0  # reads of the terminal, and operations of tqdm
        self._height = HIDDEN_FROM
        self._asked_s, self._was_taken = -math.inf, False
        self._hooks: list[tuple[Any, str, Any]] = []  # whose attribute, and what stands in for it

    # The line

    def show(self, stream: TextIO, text: str) -> None:
        """Draw the line in place of the previous one."""
        self.listen(stream)
        with self._lock:
            if stream is not self._stream:
                self._wipe()
            self._stream, self._text = stream, text
            self._height, self._asked_s = terminal_size(stream).lines or HIDDEN_FROM, -math.inf
            self._draw()

    def say(self, stream: TextIO, message: str) -> None:
        """Write a line of text above it."""
        if self._rows_of_bars():
            sys.modules["tqdm"].tqdm.write(message, file=stream)
            return
        with self._lock:
            self._wipe()
            self._put(stream, f"{message}\n")
            self._draw()

    def close(self, *, leaves_line: bool = True) -> None:
        """Leave the last line on the screen if nothing stands above it; stop listening."""
        with self._lock:
            if (
                leaves_line
                and self._rows_down == 0
                and self._stream is not None
                and is_writable(self._stream)
            ):
                self._put(self._stream, "\n")
                self._rows_down = None
            self._wipe()
            self._stream, self._text, self._rows_down = None, "", None
            for owner, name, stand_in in reversed(self._hooks):
                if owner.__dict__.get(name) is stand_in:  # who stood in for it later keeps what he has
                    self._give_back(owner, name, stand_in)
            self._hooks.clear()

    def _give_back(self, owner: Any, name: str, stand_in: Any) -> None:
        if name == "_lock":
            owner.set_lock(stand_in.own)
        elif owner in (builtins, termios):
            setattr(owner, name, stand_in.own)
        else:
            del owner.__dict__[name]

    def _draw(self) -> None:
        text = self._drawing()
        if text and self._stream is not None:
            self._put(self._stream, text)

    def _drawing(self) -> str:
        """Return the text that draws the line, which then stands; nothing if it must stay away."""
        stream = self._stream
        if stream is None or self._num_busy or not is_writable(stream):
            return ""
        rows = self._rows_below()
        if rows is None or rows >= self._height or self._is_taken():
            return ""
        wipe = self._wiping() if rows != self._rows_down else ""
        self._rows_down = rows
        if not rows:  # what is not heard is appended: two spaces keep it apart
            return f"{wipe}{CLEAR_LINE}{self._text}  "
        room = "\x1bD" * rows + f"\x1b[{rows}A"  # index, unlike a line feed, keeps the column
        return f"{wipe}{room}\x1b7\x1b[{rows}B{CLEAR_LINE}{self._text}\x1b8"

    def _wipe(self) -> None:
        text = self._wiping()
        if text and self._stream is not None and is_writable(self._stream):
            self._put(self._stream, text)

    def _wiping(self) -> str:
        """Return the text that wipes the line, which then no longer stands."""
        rows, self._rows_down = self._rows_down, None
        if rows is None:
            return ""
        return f"\x1b7\x1b[{rows}B{CLEAR_LINE}\x1b8" if rows else CLEAR_LINE

    def _is_taken(self) -> bool:
        """Ask the terminal, but not at every print."""
        now_s = time.monotonic()
        if now_s - self._asked_s > ASK_EVERY_S and self._stream is not None:
            self._asked_s = now_s
            self._was_taken = is_taken(self._stream)
        return self._was_taken

    def _put(self, stream: TextIO, text: str) -> None:
        """Write past our own stand-in."""
        hooks = (hook.own for owner, name, hook in self._hooks if owner is stream and name == "write")
        next(hooks, stream.write)(text)
        stream.flush()

    def _rows_below(self) -> int | None:
        """Return how far below the cursor the line may stand; None: nowhere."""
        bars = self._rows_of_bars()
        if bars:
            return bars
        if self._row.is_free:
            return 0
        return 1 if self._row.is_redrawn else None

    def _rows_of_bars(self) -> int:
        """Count the rows from the cursor down that tqdm draws on."""
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        rows = 0
        for bar in list(getattr(tqdm, "_instances", ())):
            at = abs(getattr(bar, "pos", HIDDEN_FROM))
            if at < HIDDEN_FROM and getattr(getattr(bar, "fp", None), "isatty", bool)():
                rows = max(rows, at + 1)
        return rows

    # What the job does

    def listen(self, stream: TextIO | None) -> None:
        """Listen to what goes to a terminal and what is read from it; once each."""
        for each in (stream, sys.stdout):
            self._hear_writes(each)
        if _is_terminal(sys.stdin):
            for name in ("readline", "read"):
                self._hear_reads(sys.stdin, name, getattr(sys.stdin, name))
            self._hear_reads(builtins, "input", builtins.input)
            self._hear_modes()
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        lock = getattr(tqdm, "__dict__", {}).get("_lock")  # is made with the first bar
        if tqdm is not None and lock is not None and not any(lock is ours for _, _, ours in self._hooks):
            hooked = HookedLock(lock, self._begin, self._end)
            tqdm.set_lock(hooked)
            self._hooks.append((tqdm, "_lock", hooked))

    def _begin(self) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._num_busy += 1
                self._wipe()

    def _end(self) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._num_busy -= 1
                self._draw()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        finally:
            self._row.clear()  # what was typed ended the row
            self._end()

    def _is_hooked(self, owner: Any, name: str) -> bool:
        return any(owner is known and name == its for known, its, _ in self._hooks)

    def _stand_in(self, owner: Any, name: str, stand_in: Any, own: Callable[..., Any]) -> None:
        stand_in.own = own
        owner.__dict__[name] = stand_in
        self._hooks.append((owner, name, stand_in))

    def _hear_reads(self, owner: Any, name: str, own: Callable[..., str]) -> None:
        if not hasattr(owner, "__dict__") or self._is_hooked(owner, name):
            return

        def read(*arguments: Any) -> str:
            with self._reading():
                return own(*arguments)

        self._stand_in(owner, name, read, own)

    def _hear_modes(self) -> None:
        """Get out of the way before a mode is set: who asks for a password writes to the terminal itself."""
        if self._is_hooked(termios, "tcsetattr"):
            return
        own = termios.tcsetattr

        def set_mode(*arguments: Any) -> None:
            if os.getpid() != self._pid:
                own(*arguments)
                return
            with self._lock:
                self._wipe()
                self._asked_s = -math.inf
                own(*arguments)

        self._stand_in(termios, "tcsetattr", set_mode, own)

    def _hear_writes(self, stream: TextIO | None) -> None:
        """Stand in for the `write` of a terminal; leave alone a stream that takes no attribute."""
        if stream is None or not _is_terminal(stream) or not hasattr(stream, "__dict__"):
            return
        if self._is_hooked(stream, "write"):
            return
        own = stream.write
        known: dict[int, bool] = {}  # the stream of the line -> whether it is the same terminal

        def shares_terminal(other: TextIO) -> bool:
            if id(other) not in known:
                known[id(other)] = _is_same_terminal(stream, other)
            return known[id(other)]

        def write(text: str) -> int:
            if os.getpid() != self._pid:  # forked: whoever held the lock is not in this process
                return own(text)
            with self._lock:
                if not text or self._stream is None:
                    self._row.take(text)
                    return own(text)
                if not shares_terminal(self._stream):
                    self._wipe()
                    written = own(text)
                    stream.flush()
                    self._draw()
                    return written
                # In one text, so that a print costs one call of the system and the line does not flicker.
                wipe = self._wiping()
                self._row.take(text)
                line = self._drawing()
                own(f"{wipe}{text}{line}")
                if line:
                    stream.flush()
                return len(text)

        self._stand_in(stream, "write", write, own)


def is_writable(stream: TextIO | None) -> bool:
    """Return whether a stream is there and open: a job may close its stderr."""
    return stream is not None and not getattr(stream, "closed", False)


def is_taken(stream: TextIO) -> bool:
    """Return whether a program reads key by key or without echo, or the shell has another job in front."""
    try:
        number = stream.fileno()
        flags = termios.tcgetattr(number)[3]
        if not flags & termios.ECHO or not flags & termios.ICANON:
            return True
        return os.tcgetpgrp(number) != os.getpgrp()
    except (AttributeError, OSError, ValueError, termios.error):
        return False


def _is_same_terminal(one: TextIO, other: TextIO) -> bool:
    if one is other:
        return True
    try:
        return os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    except (AttributeError, OSError, ValueError):
        return False


def _is_terminal(stream: Any) -> bool:
    return is_writable(stream) and bool(getattr(stream, "isatty", bool)())


def terminal_size(stream: TextIO) -> os.terminal_size:
    """Return the size of the terminal behind a stream; 0 for what is not known."""
    try:
        return os.get_terminal_size(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return os.terminal_size((0, 0))
