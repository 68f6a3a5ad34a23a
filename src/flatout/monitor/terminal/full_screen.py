"""The view that fills a terminal: draws when there is something to see, obeys keys, leaves no trace.

The terminal gets back its screen, its cursor and its echo however the view ends: by a key, by Ctrl-C, by
SIGTERM, by a hang-up or by an error.  Ctrl-Z gives it back too, and the view returns with `fg`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flatout.monitor.sample import Sample
from flatout.monitor.sampler import Sampler
from flatout.monitor.terminal.keyboard import Keyboard
from flatout.monitor.terminal.screen import Screen
from flatout.monitor.terminal.view import View

ENDED_BY_SIGNAL = 128


class Source(Protocol):
    """What a view looks at."""

    @property
    def wait_s(self) -> float | None:
        """How long there will be nothing to see; None: until it wakes the view."""

    @property
    def is_over(self) -> bool:
        """Whether nothing will come any more."""

    def advance(self) -> Sequence[Sample]:
        """What came since it was last asked."""

    def recent(self) -> tuple[Sample, ...]:
        """The last two minutes, oldest first."""


class LiveSource:
    """A sampler that runs in its own thread: a driver that hangs must not keep `q` from working."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._seen: Sample | None = None

    @property
    def wait_s(self) -> float | None:
        return None

    @property
    def is_over(self) -> bool:
        return False

    def advance(self) -> Sequence[Sample]:
        latest = self._sampler.latest
        if latest is None or latest is self._seen:
            return ()
        self._seen = latest
        return (latest,)

    def recent(self) -> tuple[Sample, ...]:
        return self._sampler.recent()


def show(source: Source, keyboard: Keyboard, *, console: Console | None = None, title: str = "") -> int:
    """Show `source` until the viewer has enough; the exit code.  `keyboard` is open already."""
    console = console or Console()
    view = View()
    live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with live:
        samples: tuple[Sample, ...] = ()
        while not view.is_over:
            if not view.is_held and source.advance():
                samples = source.recent()
            _draw(live, samples, view, title)
            for key in keyboard.wait(None if view.is_held else source.wait_s):
                num_gpus = len(samples[-1].gpus) if samples else 0
                view = view.pressed(key, num_gpus=num_gpus)
            ended = obey(keyboard, lambda: _suspend(keyboard, live))
            if ended is not None:
                return ended
    return 0


def _draw(live: Live, samples: tuple[Sample, ...], view: View, title: str) -> None:
    waiting = Text("flatout: the first sample is being taken")
    live.update(Screen(samples=samples, view=view, title=title) if samples else waiting, refresh=True)


def obey(keyboard: Keyboard, suspend: Callable[[], None]) -> int | None:
    """The exit code where a signal ends the view; Ctrl-C is raised as ever."""
    came, keyboard.signals[:] = list(keyboard.signals), []
    for number in came:
        if number == signal.SIGTSTP:
            suspend()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif number != signal.SIGWINCH:
            return ENDED_BY_SIGNAL + number
    return None


def _suspend(keyboard: Keyboard, live: Live) -> None:
    live.stop()
    keyboard.give_back()
    os.kill(os.getpid(), signal.SIGSTOP)
    keyboard.take()
    live.start(refresh=True)
