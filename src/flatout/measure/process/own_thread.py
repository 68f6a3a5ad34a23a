"""A thread of ours in the job's process, which is away while the process forks.

Python 3.12 and later warn a process that forks while it has other threads.  The job has not started ours, so
it would be warned of something that it does not do.  A lock that our thread holds at a fork would stay locked
in the new process, too.  So our threads end before a fork and start again after it, in the old process alone.

torch's profiler leaves a thread that nobody can end.  If we started it and the job has no thread of its own,
a filter hides that one warning.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from flatout.measure.clock import now

MOST_S = 0.1  # for a thread to end; a fork does not wait longer
POLL_S = 0.0001

TASKS = "/proc/self/task"
HIDES: Any = ("ignore", re.compile("This process .* is multi-threaded"), DeprecationWarning, None, 0)

_running: list[OwnThread] = []
_num_left = 0  # threads that torch started for us and keeps


class OwnThread:
    """Runs `work(leave)`; it returns soon after `leave` is set, and is called again after a fork."""

    def __init__(self, work: Callable[[threading.Event], None], *, name: str) -> None:
        self._work, self._name = work, name
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        _watch_forks()
        _running.append(self)
        self.come_back()

    def stop(self) -> None:
        """Stop without waiting."""
        self._is_over()
        self._leave.set()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def go_away(self) -> None:
        """End the thread before a fork."""
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return
        self._leave.set()
        until_s = now() + MOST_S
        thread.join(MOST_S)
        # Python has ended it, but the system, which Python asks for the number of threads, may still list it
        while sys.platform == "linux" and now() < until_s and _is_listed(thread):
            time.sleep(POLL_S)

    def come_back(self) -> None:
        """Start the thread, or start it again after a fork."""
        if self._thread is None and self in _running:
            self._leave = threading.Event()
            thread = threading.Thread(target=self._run, args=(self._leave,), name=self._name, daemon=True)
            self._thread = thread
            with contextlib.suppress(RuntimeError):  # Python is about to end
                thread.start()

    def stay_away(self) -> None:
        """Forget the thread in a process that was forked; its event may be locked there."""
        self._leave = threading.Event()
        self._thread = None

    def _run(self, leave: threading.Event) -> None:
        self._work(leave)
        if not leave.is_set():
            self._is_over()

    def _is_over(self) -> None:
        with contextlib.suppress(ValueError):
            _running.remove(self)


def _is_listed(thread: threading.Thread) -> bool:
    return os.path.exists(f"{TASKS}/{thread.native_id}")


@contextlib.contextmanager
def torch_keeps_threads() -> Iterator[None]:
    """Note the threads that torch starts in this block: they are ours, not the job's."""
    global _num_left
    before = _num_threads()
    yield
    _num_left += max(0, _num_threads() - before)


def _num_threads() -> int:
    return len(os.listdir(TASKS)) if sys.platform == "linux" else 1


@functools.cache  # a hook stays for good
def _watch_forks() -> None:
    os.register_at_fork(before=_leave, after_in_parent=_come_back, after_in_child=_stay_away)


def _leave() -> None:
    for thread in tuple(_running):
        thread.go_away()
    _hide_warning(hidden=1 < _num_threads() <= 1 + _num_left)


def _hide_warning(*, hidden: bool) -> None:
    """Put our filter first, or remove it.

    The list is changed in place: `warnings.filterwarnings` would let warnings that were shown come again.
    Later releases of Python warn after all hooks of a fork, so the filter stays until the next one.
    """
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    while HIDES in filters:
        filters.remove(HIDES)
    if hidden:
        filters.insert(0, HIDES)


def _come_back() -> None:
    for thread in tuple(_running):
        thread.come_back()


def _stay_away() -> None:
    for thread in _running:
        thread.stay_away()
    _running.clear()
    _hide_warning(hidden=False)
