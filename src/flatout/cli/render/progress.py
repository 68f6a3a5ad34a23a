"""Progress on stderr: count, rate and time left, as a live line on a terminal or lines in a pipe.

A rate starts at the first count, so that what was loaded before it or done by an earlier call is not part
of it; until a second count there is none.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from flatout.cli.output import say
from flatout.ground.errors import Interrupted
from flatout.ground.torchrun import read_launch
from flatout.ground.units import show_rough, show_seconds

if TYPE_CHECKING:
    from flatout.engines.steering.search.halved_search import Event

TENTHS = 10  # lines that a count prints without a terminal
OnText = Callable[[str], None]


@contextlib.contextmanager
def launched_line() -> Iterator[tuple[bool, OnText, OnText]]:
    """Yield (whether this process reports for all ranks, update the live line, print a line that stays)."""
    if read_launch().is_first:
        with live_line() as (update, stay):
            yield True, update, stay
        return
    try:
        yield False, (lambda message: None), (lambda message: None)
    except Interrupted as interrupt:
        raise typer.Exit(interrupt.exit_code) from None


@contextlib.contextmanager
def live_line() -> Iterator[tuple[OnText, OnText]]:
    """Yield (update the live line, print a line that stays above it)."""
    if not sys.stderr.isatty():
        yield say, say
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("flatout: loading") as status:
        yield (
            lambda message: status.update("flatout: " + message.replace("[", r"\[")),
            lambda message: console.print(f"flatout: {message}", markup=False),
        )


class Pace:
    """Counts things of one kind, named in the plural."""

    def __init__(self, noun: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._noun, self._clock = noun, clock
        self._first: tuple[int, float] | None = None

    def parts(self, done: int, total: int | None) -> list[str]:
        """Describe the count, the rate and the time left, as far as they are known."""
        said = [f"{done} {self._noun}" if total is None else f"{done} of {total} {self._noun}"]
        rate = self._rate(done)
        if rate is not None:
            one = self._noun.removesuffix("s")
            fast = f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
            said.append(f"{fast} {self._noun}/s" if rate >= 1 else f"{show_seconds(1 / rate)} per {one}")
            if total is not None and done < total:
                said.append(f"about {show_rough((total - done) / rate)} left")
        return said

    def _rate(self, done: int) -> float | None:
        now_s = self._clock()
        if self._first is None:
            self._first = done, now_s
        before, began_s = self._first
        return (done - before) / (now_s - began_s) if done > before and now_s > began_s else None


@contextlib.contextmanager
def counting(noun: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `on_progress(done, total)`."""
    with live_line() as (update, _):
        yield Counting(noun, update)


class Counting:
    """Reports a count: each time on a terminal, at each tenth elsewhere."""

    def __init__(self, noun: str, update: Callable[[str], None]) -> None:
        self._pace, self._update, self._told = Pace(noun), update, -1

    def __call__(self, done: int, total: int) -> None:
        said = " · ".join(self._pace.parts(done, total))
        tenth = TENTHS * done // max(total, 1)
        if sys.stderr.isatty() or tenth > self._told:
            self._told = tenth
            self._update(said)


@contextlib.contextmanager
def searching() -> Iterator[tuple[OnText, Callable[[Event], None]]]:
    """Yield (`on_progress`, `on_event`) of a steering search."""
    with live_line() as (update, stay):
        tally, texts = Tally(), Counting("texts", update)

        def on_event(event: Event) -> None:
            if event.kind == "extracted":
                texts(event.num_done or 0, event.num_total or 0)
                return
            tally.count(event)
            if tally.is_round_over or (sys.stderr.isatty() and event.kind == "row"):
                update(tally.line())

        yield stay, on_event


class Tally:
    """Counts the trials of a study by how they ended; those of other workers are known at every round."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.started = self.complete = self.pruned = self.failed = self.rows = 0
        self.best: float | None = None
        self.is_round_over = False  # the last event ended the last of the trials that ran together
        self._total: int | None = None  # trials that the search is to have
        self._elsewhere = 0  # trials that others ended, and earlier calls
        self._trials, self._rows = Pace("trials", clock=clock), Pace("rows", clock=clock)

    @property
    def ended(self) -> int:
        """Trials that ended in this process."""
        return self.complete + self.pruned + self.failed

    def count(self, event: Event) -> None:
        if event.kind == "round" and event.num_done is not None:
            self._total, self._elsewhere = event.num_total, event.num_done - self.ended
            self._trials.parts(event.num_done, self._total)  # the clock runs from here
            self._rows.parts(self.rows, None)
        self.started += event.kind in ("started", "resumed")
        self.complete += event.kind == "complete"
        self.pruned += event.kind == "pruned"
        self.failed += event.kind == "failed"
        self.rows += event.kind == "row"
        if event.kind == "complete" and event.value is not None:
            self.best = event.value if self.best is None else max(self.best, event.value)
        ends = event.kind in ("complete", "pruned", "failed")
        self.is_round_over = ends and self.ended == self.started

    def line(self) -> str:
        parts = self._trials.parts(self._elsewhere + self.ended, self._total)
        parts += [
            f"{number} {name}"
            for name, number in (("pruned", self.pruned), ("failed", self.failed))
            if number
        ]
        parts += self._rows.parts(self.rows, None)
        if self.best is not None:
            parts.append(f"best {self.best:.3f}")
        return " · ".join(parts)
