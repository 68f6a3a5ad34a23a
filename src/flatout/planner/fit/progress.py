"""What a plan reports while it works: its current question, the time so far, and about how much is left.

A plan knows its questions in advance, but not which of them need a trace: an answer that is stored or follows
from another takes no time.  So it prints a line when a trace begins, not when a question is asked, and
estimates the time left from the questions that needed one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from flatout.ground import OnProgress, ignore
from flatout.ground.units import show_rough

SEARCH, PEAK = 5, 1  # traces that a largest batch and a peak take


class Progress:
    """Counts the questions of a plan and reports those that take long."""

    def __init__(self, say: OnProgress = ignore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._start_s = clock()
        self._ahead: list[int] = []  # traces that each question to come takes, if it takes any
        self._num_asked = 0
        self._question = ""
        self._asked_s = self._start_s
        self._num_expected = 0  # traces of the question that is asked
        self._num_made = 0  # those it has taken so far
        self._known: list[tuple[int, float]] = []  # (traces, seconds) of questions that took some

    def expect(self, num_traces: Iterable[int]) -> None:
        """Announce the questions ahead, each with the traces it takes."""
        self._ahead = list(num_traces)

    def ask(self, question: str) -> None:
        """Start a question; the previous one is answered."""
        now_s = self._clock()
        if self._num_made:
            self._known.append((self._num_made, now_s - self._asked_s))
        self._question, self._asked_s, self._num_made = question, now_s, 0
        self._num_asked += 1
        self._num_expected = self._ahead.pop(0) if self._ahead else 1

    def count(self, num_traces: int) -> None:
        """Count traces that are about to be made."""
        self._num_made += num_traces

    def work(self, message: str) -> None:
        """Report work that takes a while: a trace, or a real run."""
        if not self._question:
            self._say(message)
            return
        so_far = f"{self._num_asked} of {self._num_asked + len(self._ahead)}"
        elapsed_s, left_s = self._clock() - self._start_s, self._left_s()
        if elapsed_s >= 1:
            so_far += f", {show_rough(elapsed_s)}"
        if left_s is not None and left_s >= 1:
            so_far += f", about {show_rough(left_s)} left"
        self._say(f"[{so_far}] {self._question}: {message}")

    def _left_s(self) -> float | None:
        """Return the seconds left; None until a question has been answered by traces."""
        if not self._known:
            return None
        each_s = sum(seconds for _, seconds in self._known) / sum(made for made, _ in self._known)
        this_s = max(each_s, each_s * self._num_expected - (self._clock() - self._asked_s))
        return each_s * sum(self._ahead) + this_s
