"""Trials that start beside each other and take their steps one after the other.

Importing torch, starting CUDA and making a model often take longer than the steps of a trial.  So trials that
are compared by time start together.  Each waits after its first step until the others have taken theirs and
those before it have ended; one that waits runs nothing, so that no step meets any work of another trial.  Its
loader workers still fill their queues when it begins to wait: the first turn begins once they are quiet.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import psutil

LOOK_S = 0.1  # between two looks at a process that may have ended
QUIET = 0.2  # of a core, for all trials that wait
SETTLES_S = 5.0  # at most, before the first turn


class Turns:
    """The order of some trials, each of which is run by a thread of its own."""

    def __init__(self, num_trials: int) -> None:
        self._changed = threading.Condition()
        self._starting, self._ended = set(range(num_trials)), set[int]()
        self._pids: list[int] = []
        self._is_settled = False

    def all(self) -> list[TrialTurn]:
        """Return the turns, in their order."""
        return [TrialTurn(self, place) for place in sorted(self._starting)]

    def wait(self, place: int, pid: int, *, is_over: Callable[[], bool]) -> None:
        """Return when all have started and those before this one have ended, or it is over itself."""
        with self._changed:
            self._pids.append(pid)
            self._starting.discard(place)
            self._changed.notify_all()
            while not is_over() and (self._starting or not self._ended.issuperset(range(place))):
                self._changed.wait(LOOK_S)
        if not self._is_settled and not is_over():  # the first turn: others wait for its end
            self._is_settled = True
            wait_until_quiet(self._pids)

    def end(self, place: int) -> None:
        with self._changed:
            self._starting.discard(place)  # it may have ended before it waited
            self._ended.add(place)
            self._changed.notify_all()


class TrialTurn:
    """One trial's place in the order, and the pipes to its process."""

    def __init__(self, turns: Turns, place: int) -> None:
        self._turns, self._place = turns, place
        self._is_ready, child_ready = os.pipe()
        child_goes, self._goes = os.pipe()
        self.of_child = child_ready, child_goes  # it writes to one after its first step, and reads the other
        self._open = {self._is_ready, self._goes, *self.of_child}

    def begin(self, process: subprocess.Popen[bytes], *, limit_s: float) -> None:
        """Let a process take its steps when it is its turn; raise TimeoutExpired if it does not get there."""
        self._close(*self.of_child)
        ends_s = time.monotonic() + limit_s
        while process.poll() is None and not select.select([self._is_ready], [], [], LOOK_S)[0]:
            if time.monotonic() >= ends_s:
                raise subprocess.TimeoutExpired(process.args, limit_s)
        self._turns.wait(self._place, process.pid, is_over=lambda: process.poll() is not None)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._goes, b"1")

    def end(self) -> None:
        """Let the next one begin, whatever became of this one."""
        self._close(*self._open)
        self._turns.end(self._place)

    def _close(self, *ends: int) -> None:
        for each in self._open.intersection(ends):
            os.close(each)
        self._open.difference_update(ends)


def wait_for_turn(turn: tuple[int, int]) -> float:
    """Wait for the turn of this process, between two steps; return the seconds that took."""
    began_s, (ready, goes) = time.perf_counter(), turn
    with contextlib.suppress(OSError):  # the script may have closed what it did not open
        os.write(ready, b"1")
        os.read(goes, 1)
        os.close(ready)
        os.close(goes)
    return time.perf_counter() - began_s


def wait_until_quiet(pids: Sequence[int]) -> None:
    """Wait until these processes and their children have no more work."""
    ends_s, used_s = time.monotonic() + SETTLES_S, _used_s(pids)
    while time.monotonic() < ends_s:
        began_s = time.monotonic()
        time.sleep(LOOK_S)
        before_s, used_s = used_s, _used_s(pids)
        if used_s - before_s < QUIET * (time.monotonic() - began_s):
            return


def _used_s(pids: Sequence[int]) -> float:
    """Return the seconds of cores that processes and their children have used."""
    found = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = each.cpu_times()
                    found += times.user + times.system
    return found
