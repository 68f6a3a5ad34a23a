"""Pauses of Python's garbage collector, as the collector itself reports them.

A collection walks the objects of its generation while the interpreter stands still: some microseconds for the
youngest generation, a tenth of a second for a full collection of a million objects.  The collector reports
when it begins and ends, so nothing has to be guessed, and a job without collections pays nothing.  A
collection while torch.compile makes its objects belongs to the cost of compiling.

Python drops what a listener of the collector, a callback of a weak reference or a `__del__` raises.  A signal
that arrives during a collection raises in the first Python code after it, which is one of these: a Ctrl-C
would be lost, so it is sent once more.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import threading
from typing import Any

from flatout.measure.clock import now
from flatout.measure.evidence import Garbage, Place
from flatout.measure.patches import Patches, keep_out_of_graphs
from flatout.measure.user_code import UserCode

AGAIN_S = 0.01  # after a dropped interrupt, when the listener has returned
MOST_OF_IT = 0.9  # of all pause time, to count the steps that hold it


class GarbageWatch:
    """Adds up pauses by step; an arm can suppress the collections that the job asks for."""

    def __init__(self, user_code: UserCode) -> None:
        self._user_code = user_code
        self._begun_at_s = self._step_s = self._asked_in_step_s = 0.0
        self.pauses_s: list[float] = []  # of each real step
        self.asked_s = 0.0  # of them, by calls of gc.collect
        self.place: Place | None = None  # of such a call
        self.stopped = False

    def install(self, patches: Patches) -> None:
        keep_out_of_graphs(GarbageWatch._note)
        gc.callbacks.append(self._note)
        patches.on_undo(lambda: gc.callbacks.remove(self._note))
        shown = sys.unraisablehook

        def show_or_send_again(dropped: sys.UnraisableHookArgs) -> None:
            if issubclass(dropped.exc_type, KeyboardInterrupt):
                threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT)).start()
            else:
                shown(dropped)

        patches.replace(sys, "unraisablehook", show_or_send_again)
        collect = gc.collect

        def collect_noted(*args: Any, **kwargs: Any) -> int:
            frame = sys._getframe(1)
            if not (self._user_code.is_user(frame.f_code) or self._user_code.is_library(frame.f_code)):
                return collect(*args, **kwargs)  # our own call
            if self.stopped:
                return 0
            self.place = self._user_code.place(frame)[0] or self.place
            before_s = self._step_s
            found = collect(*args, **kwargs)
            self._asked_in_step_s += self._step_s - before_s
            return found

        patches.replace(gc, "collect", collect_noted)

    def _note(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._begun_at_s = now()
        else:
            self._step_s += now() - self._begun_at_s

    def step_end(self, arm: str, *, compiled: bool = False) -> None:
        if arm == "real":
            self.pauses_s.append(self._asked_in_step_s if compiled else self._step_s)
            self.asked_s += self._asked_in_step_s
        self.forget_step()

    def forget_step(self) -> None:
        """Forget what was collected before the step begins."""
        self._step_s = self._asked_in_step_s = 0.0

    def evidence(self, *, steps_s: float) -> Garbage | None:
        """Return the pauses of unchanged steps; None if there was none, or no step."""
        if not sum(self.pauses_s) or steps_s <= 0:
            return None
        return Garbage(
            num_steps=len(self.pauses_s),
            steps_s=steps_s,
            pauses_s=sum(self.pauses_s),
            num_paused=num_paused(self.pauses_s),
            asked_s=self.asked_s,
            place=self.place,
        )


def num_paused(pauses_s: list[float]) -> int:
    """Return the fewest steps that hold most of the pauses."""
    so_far = itertools.accumulate(sorted(pauses_s, reverse=True))
    return 1 + sum(held_s < MOST_OF_IT * sum(pauses_s) for held_s in so_far)
