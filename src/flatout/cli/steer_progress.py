"""How far a steering verb is: a live line on a terminal, lines elsewhere, always on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from flatout.engines.steering.search import Event

TENTHS = 10  # lines that a count gives where there is no terminal


@contextlib.contextmanager
def counting(noun: str) -> Iterator[Callable[[int, int], None]]:
    """`on_progress(done, total)`."""
    with _shown() as (update, _):
        told = -1

        def on_progress(done: int, total: int) -> None:
            nonlocal told
            tenth = TENTHS * done // max(total, 1)
            if sys.stderr.isatty() or tenth > told:
                told = tenth
                update(f"{done} of {total} {noun}")

        yield on_progress


@contextlib.contextmanager
def searching() -> Iterator[tuple[Callable[[str], None], Callable[[Event], None]]]:
    """(`say`, `on_event`) of a search."""
    with _shown() as (update, say):
        tally = Tally()

        def on_event(event: Event) -> None:
            tally.count(event)
            if tally.is_round_over or (sys.stderr.isatty() and event.kind == "row"):
                update(tally.line())

        yield say, on_event


class Tally:
    """Trials of this process by what became of them."""

    def __init__(self) -> None:
        self.started = self.complete = self.pruned = self.failed = self.rows = 0
        self.best: float | None = None
        self.is_round_over = False  # the last event ended the last of the trials that ran together

    def count(self, event: Event) -> None:
        self.started += event.kind in ("started", "resumed")
        self.complete += event.kind == "complete"
        self.pruned += event.kind == "pruned"
        self.failed += event.kind == "failed"
        self.rows += event.kind == "row"
        if event.kind == "complete" and event.value is not None:
            self.best = event.value if self.best is None else max(self.best, event.value)
        ended = self.complete + self.pruned + self.failed
        self.is_round_over = event.kind in ("complete", "pruned", "failed") and ended == self.started

    def line(self) -> str:
        parts = [f"{self.complete + self.pruned + self.failed} of {self.started} trials begun have ended"]
        parts += [
            f"{number} {name}"
            for name, number in (("pruned", self.pruned), ("failed", self.failed))
            if number
        ]
        parts.append(f"{self.rows} rows")
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
