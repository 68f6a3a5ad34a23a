"""How far a steering verb is: a live line on a terminal, lines elsewhere, always on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from flatout.cli.pace import Pace

if TYPE_CHECKING:
    from flatout.engines.steering.search.halved_search import Event

TENTHS = 10  # lines that a count gives where there is no terminal


@contextlib.contextmanager
def counting(noun: str) -> Iterator[Callable[[int, int], None]]:
    """`on_progress(done, total)`."""
    with _shown() as (update, _):
        yield Counting(noun, update)


class Counting:
    """Tells a count: each time on a terminal, at each tenth elsewhere."""

    def __init__(self, noun: str, update: Callable[[str], None]) -> None:
        self._pace, self._update, self._told = Pace(noun), update, -1

    def __call__(self, done: int, total: int) -> None:
        said = " · ".join(self._pace.parts(done, total))
        tenth = TENTHS * done // max(total, 1)
        if sys.stderr.isatty() or tenth > self._told:
            self._told = tenth
            self._update(said)


@contextlib.contextmanager
def searching() -> Iterator[tuple[Callable[[str], None], Callable[[Event], None]]]:
    """(`say`, `on_event`) of a search."""
    with _shown() as (update, say):
        tally, texts = Tally(), Counting("texts", update)

        def on_event(event: Event) -> None:
            if event.kind == "extracted":
                texts(event.num_done or 0, event.num_total or 0)
                return
            tally.count(event)
            if tally.is_round_over or (sys.stderr.isatty() and event.kind == "row"):
                update(tally.line())

        yield say, on_event


class Tally:
    """The trials of a study by what became of them; what other workers ended is known at every round."""

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


@contextlib.contextmanager
def _shown() -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """(what replaces the live line, what stays above it)."""
    if not sys.stderr.isatty():

        def say(message: str) -> None:
            typer.echo(f"flatout: {message}", err=True)

        yield say, say
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("flatout: loading") as status:
        yield (
            lambda message: status.update(f"flatout: {message}"),
            lambda message: console.print(f"flatout: {message}", markup=False),
        )
