"""The three ways to look at samples as they come: a full screen, plain lines, or one sample.

Lines are for pipes, log files and terminals that can do nothing: the live line at every sample, and the
verdict whenever it becomes another one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import TextIO

from flatout.monitor.sample import Sample
from flatout.monitor.sampler import RECENT_S, Sampler
from flatout.monitor.terminal.full_screen import LiveSource, Source, obey, show
from flatout.monitor.terminal.keyboard import Keyboard, standard_input
from flatout.monitor.terminal.live_line import live_line
from flatout.monitor.verdicts.verdict import verdict
from flatout.page.printable import printable

LINE_SPAN_S = 10.0
NO_VERDICT = "unknown"

Writer = Callable[[tuple[Sample, ...]], None]


def follow_live(sampler: Sampler, *, on_screen: bool, write: Writer) -> int:
    """Show what a sampler takes from here on; the exit code."""
    keyboard = Keyboard(standard_input() if on_screen else None)
    with keyboard:
        sampler.listeners.append(lambda sample: keyboard.wake())
        with sampler:
            source = LiveSource(sampler)
            return show(source, keyboard) if on_screen else write_lines(source, keyboard, write=write)


def follow_replay(source: Source, *, on_screen: bool, title: str, write: Writer) -> int:
    """Show a run again; the exit code."""
    with Keyboard(standard_input() if on_screen else None) as keyboard:
        if on_screen:
            return show(source, keyboard, title=title)
        return write_lines(source, keyboard, write=write)


def write_lines(source: Source, keyboard: Keyboard, *, write: Writer) -> int:
    """Give every sample to `write`, until there is none to come, the job is over, or a signal ends it."""
    recent: deque[Sample] = deque()
    while True:
        for sample in source.advance():  # a fast replay has many at once
            recent.append(sample)
            while sample.time_s - recent[0].time_s > RECENT_S:
                recent.popleft()
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
        near = tuple(each for each in samples if latest.time_s - each.time_s <= LINE_SPAN_S)
        self._stream.write(live_line(near) + "\n")
        for note in latest.notes:
            self._stream.write(printable(f"note: {note}") + "\n")
        found = verdict(samples)
        if found.bound not in (self._bound, NO_VERDICT):
            self._bound = found.bound
            self._stream.write(printable(f"verdict: {found}") + "\n")
        self._stream.flush()


class Documents:
    """Writes every sample as one JSON document a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, samples: tuple[Sample, ...]) -> None:
        self._stream.write(json.dumps(samples[-1].to_json(), separators=(",", ":")) + "\n")
        self._stream.flush()
