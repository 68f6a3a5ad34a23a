"""Samples as they come: in a view that fills the terminal, or as plain lines.

The terminal gets back its screen, its cursor and its echo however the view ends: by a key, by Ctrl-C, by
SIGTERM, by a hang-up or by an error.  Ctrl-Z gives it back too, and the view returns with `fg`.

Lines are for pipes, log files and terminals that can do nothing: the live line at every sample, and the
verdict whenever it becomes another one.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flatout.monitor.past.playback import Playback
from flatout.monitor.sample import Sample, drop_older, last_seconds
from flatout.monitor.sampler import RECENT_S, Sampler
from flatout.monitor.sinks.files import JsonLines
from flatout.monitor.terminal.keyboard import Keyboard, standard_input
from flatout.monitor.terminal.live_line import live_line
from flatout.monitor.terminal.screen import Screen
from flatout.monitor.terminal.view import View
from flatout.monitor.verdicts.verdict import verdict
from flatout.page.printable import printable

LINE_SPAN_S = 10.0
NO_VERDICT = "unknown"
ENDED_BY_SIGNAL = 128

Writer = Callable[[tuple[Sample, ...]], None]


class LiveSource:
    """A sampler in its own thread, shaped like a Playback: a hung driver must not keep `q` from working."""

    wait_s: float | None = None  # the sampler wakes the view
    is_over = False

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._seen: Sample | None = None

    def advance(self) -> Sequence[Sample]:
        latest = self._sampler.latest
        if latest is None or latest is self._seen:
            return ()
        self._seen = latest
        return (latest,)

    def recent(self) -> tuple[Sample, ...]:
        return self._sampler.recent()


SampleSource = LiveSource | Playback


def follow_live(sampler: Sampler, *, on_screen: bool, write: Writer) -> int:
    """Show what a sampler takes from here on; return the exit code."""
    keyboard = Keyboard(standard_input() if on_screen else None)
    with keyboard:
        sampler.listeners.append(lambda sample: keyboard.wake())
        with sampler:
            source = LiveSource(sampler)
            return show(source, keyboard) if on_screen else write_lines(source, keyboard, write=write)


def follow_replay(source: SampleSource, *, on_screen: bool, title: str, write: Writer) -> int:
    """Replay a run; return the exit code."""
    with Keyboard(standard_input() if on_screen else None) as keyboard:
        if on_screen:
            return show(source, keyboard, title=title)
        return write_lines(source, keyboard, write=write)


def show(source: SampleSource, keyboard: Keyboard, *, console: Console | None = None, title: str = "") -> int:
    """Show `source` until the viewer quits; return the exit code.  `keyboard` must be open."""
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
    """Act on signals; return the exit code if one ends the view.  Ctrl-C is raised."""
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


def write_lines(source: SampleSource, keyboard: Keyboard, *, write: Writer) -> int:
    """Give every sample to `write` until the source or the job ends, or a signal comes."""
    recent: deque[Sample] = deque()
    while True:
        for sample in source.advance():  # a fast replay has many at once
            recent.append(sample)
            drop_older(recent, RECENT_S)
            write(tuple(recent))
        job = recent[-1].job if recent else None
        if source.is_over or (job is not None and job.state in ("ended", "died")):
            return 0
        keyboard.wait(source.wait_s)
        ended = obey(keyboard, lambda: None)
        if ended is not None:
            return ended


class Lines:
    """Writes lines for people."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bound = NO_VERDICT
        self._said_missing = False

    def __call__(self, samples: tuple[Sample, ...]) -> None:
        latest = samples[-1]
        if not self._said_missing and not latest.gpus and "gpus" in latest.missing:
            self._said_missing = True
            self._stream.write(printable(f"no GPU: {latest.missing['gpus']}") + "\n")
        self._stream.write(live_line(last_seconds(samples, LINE_SPAN_S)) + "\n")
        for note in latest.notes:
            self._stream.write(printable(f"note: {note}") + "\n")
        found = verdict(samples)
        if found.bound not in (self._bound, NO_VERDICT):
            self._bound = found.bound
            self._stream.write(printable(f"verdict: {found}") + "\n")
        self._stream.flush()


def documents(stream: TextIO) -> Writer:
    """Make a writer of every sample as one JSON document a line."""
    sink = JsonLines(stream)
    return lambda samples: sink(samples[-1])
