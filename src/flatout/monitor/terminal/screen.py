"""The terminal view as one picture: verdict, GPUs, curves, the job, the host, processes, keys.

A pure function of samples and of what the viewer chose, for the size of a terminal: the same function draws
a live machine, the replay of a run and the pictures of the docs.  Where the terminal is low, processes give
way first; the last line always says which keys there are.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from flatout.ground.units import show_seconds
from flatout.monitor.sample import Sample
from flatout.monitor.terminal.panels import (
    DIM,
    Paper,
    curves,
    gpu_table,
    host_line,
    job_lines,
    process_table,
    text,
)
from flatout.monitor.terminal.view import KEYS, View
from flatout.monitor.verdicts.verdict import verdicts
from flatout.monitor.verdicts.window import Verdict
from flatout.page.printable import printable

STYLES = {
    "healthy": "green",
    "compute": "green",
    "unknown": DIM,
    "diverged": "bold red",
    "memory": "bold red",
    "stalled": "bold red",
    "throttled": "red",
}
WORTH_SEEING = "yellow"
MOST_NOTES = 2
MOST_LINES = 120
LONGEST_SENTENCE = 400
NOTES_S = 60.0
NARROW, LOW = 76, 30
GAP = Text()
FOOTNOTE = (
    "util is the share of time in which some kernel ran, however small: it does not say how much of the GPU "
    "was used. SM is the share of its processors that worked (Hopper and later). CPU of a process: 1.00 is "
    "one core. n/a is unknown, never zero."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Screen:
    """A renderable that fills the terminal it is drawn on; there is at least one sample."""

    samples: Sequence[Sample]
    view: View = field(default_factory=View)
    title: str = ""  # what is shown if it is not the live machine: "replay"
    is_still: bool = False  # one picture: as high as it needs to be, without keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = MOST_LINES if self.is_still else options.height or options.size.height
        paper = Paper(
            width=options.max_width,
            is_low=height < LOW,
            has_blocks=not options.ascii_only,
            has_colour=console.color_system is not None,
        )
        body = _Body(console, options, room=max(height - 1, 0))
        for part in _help() if self.view.shows_help else _parts(self, paper, body):
            body.add(part)
        if self.is_still:
            yield from body.drawn()
            return
        footer = console.render_lines(_footer(self, paper), options.update(height=1))
        body.lines += [*body.filling(), *footer[:1]]
        yield from body.drawn()


class _Body:
    """Lines from the top down, as many as there is room for."""

    def __init__(self, console: Console, options: ConsoleOptions, *, room: int) -> None:
        self._console, self._options, self._room = console, options.update(height=None), room
        self.lines: list[list[Segment]] = []

    @property
    def left(self) -> int:
        return self._room - len(self.lines)

    def add(self, part: RenderableType) -> None:
        self.lines += self._console.render_lines(part, self._options.reset_height())[: max(self.left, 0)]

    def drawn(self) -> Iterator[Segment]:
        for line in self.lines:
            yield from line
            yield Segment.line()

    def filling(self) -> list[list[Segment]]:
        return [[Segment(" " * self._options.max_width)] for _ in range(self.left)]


def _parts(screen: Screen, paper: Paper, body: _Body) -> Iterator[RenderableType]:
    """Yield the parts from the top down, each after the ones above it are drawn."""
    latest = screen.samples[-1]
    yield _head(screen, latest, paper)
    found = verdicts(screen.samples)
    if not (screen.is_still and found[0].bound == "unknown"):  # one sample is too few for a verdict
        yield verdict_lines(found, paper)
    yield from _notes(screen.samples)
    gap = () if paper.is_low else (GAP,)
    yield from gap
    yield gpu_table(latest, screen.view, paper)
    yield from gap
    yield curves(screen.samples, screen.view, paper)
    if latest.job is not None:
        yield from (*gap, *job_lines(latest.job), *gap)
    yield host_line(latest.host)
    if screen.view.shows_processes and latest.processes and body.left > 3:
        yield from gap
        yield process_table(latest, screen.view, paper, rows=body.left - 2)


def _head(screen: Screen, latest: Sample, paper: Paper) -> Table:
    """Show the run's name on the left, the time of the sample on the right."""
    job = latest.job
    named = Text("flatout ", style="bold")
    if screen.title:
        named.append_text(text(f"{screen.title} "))
    if job is not None:
        named.append_text(text(job.name or "job", style="bold cyan"))
        named.append(f" pid {job.pid} ", style=DIM)
        named.append(job.state, style="green" if job.state == "running" else "red")
    time = datetime.datetime.fromtimestamp(latest.time_s)
    shown = f"{time:%H:%M:%S}" if paper.width < NARROW else f"{time:%Y-%m-%d %H:%M:%S}"
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column(no_wrap=True, justify="right")
    table.add_row(named, Text("held" if screen.view.is_held else shown, style=DIM))
    return table


def verdict_lines(found: Sequence[Verdict], paper: Paper) -> RenderableType:
    """Show what bounds the run and what to do, then the other verdicts without their advice."""
    first = found[0]
    rules = f" ({' '.join(first.rules)})" if first.rules else ""
    lines: list[RenderableType] = [
        _sentence(first.sentence, style=STYLES.get(first.bound, WORTH_SEEING)),
        Padding(_sentence(f"{first.action}{rules}"), (0, 0, 0, 2)),
    ]
    if first.evidence and paper.width >= NARROW and not paper.is_low:
        lines.append(Padding(_sentence("; ".join(first.evidence), style=DIM), (0, 0, 0, 2)))
    lines += [_sentence(f"also: {other.sentence}", style=DIM) for other in found[1:]]
    return Group(*lines)


def _sentence(words: str, *, style: str = "") -> Text:
    shown = printable(words)[:LONGEST_SENTENCE]
    return Text(shown[:1].upper() + shown[1:], style=style)


def _notes(samples: Sequence[Sample]) -> Iterator[Text]:
    """Show what happened in the last minute, such as a gap or a lost GPU."""
    latest_s = samples[-1].time_s
    noted = {
        note: sample.time_s
        for sample in samples
        if latest_s - sample.time_s <= NOTES_S
        for note in sample.notes
    }
    for note, time_s in list(noted.items())[-MOST_NOTES:]:
        yield Text(printable(f"{show_seconds(latest_s - time_s)} ago: {note}"), style="magenta")


def _help() -> Iterator[RenderableType]:
    yield Text("flatout watch: keys", style="bold")
    yield GAP
    table = Table.grid(padding=(0, 3))
    for key, meaning in KEYS:
        table.add_row(Text(key, style="bold"), meaning)
    yield table
    yield GAP
    yield Text(FOOTNOTE, style=DIM)


def _footer(screen: Screen, paper: Paper) -> Text:
    if screen.view.shows_help:
        return Text("? back", style="reverse", no_wrap=True)
    sort = f"s sort: {screen.view.sorted_by(len(screen.samples[-1].gpus))}"
    words = ["q quit", sort, "tab GPU", "p processes", "space hold", "? help"]
    if paper.width < NARROW:
        words = ["q quit", sort, "tab GPU", "? help"]
    return Text("  ".join(words).ljust(paper.width), style="reverse", no_wrap=True, overflow="crop")
