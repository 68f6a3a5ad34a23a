"""`flatout.watch`: a job that reports its steps, and shows how it does while it runs.

    for batch in flatout.watch(loader):          # a step per batch; the wait for each is timed
        ...

    with flatout.watch(loader) as watch:         # steps that the job counts itself, with their figures
        for batch in watch:
            ...
            watch.step(loss=loss, lr=scheduler.get_last_lr()[0])

A process has one watched run, however many loops it has: the loops of later epochs join the run of the
first.  The run ends with the outermost `with`, or with the process; a later `with` of the same name, such as
that of the next epoch, goes on with it.  Of several ranks each reports, and rank
0 alone shows the line and keeps the log.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from flatout.ground.errors import BadInput
from flatout.ground.runs import (
    CHANNEL_FILE,
    create_run,
    end_of,
    end_run,
    read_run,
    runs_folder,
    this_run,
    write_run,
)
from flatout.measure import PHASES
from flatout.monitor.job.reporter import Reporter
from flatout.monitor.past.history import HistoryWriter
from flatout.monitor.sample import Sample
from flatout.monitor.sampler import Sampler, period_of
from flatout.monitor.terminal.live_line import LineWriter

Batch = TypeVar("Batch")
LINE_SPAN_S = 10.0
CONSEQUENCE = "the job continues, but its log is incomplete"
NAMED = PHASES[:-1]  # a job names any of them but the rest


class WatchedRun:
    """The run of this process: its folder, its reporter, and the sampler that watches it."""

    def __init__(
        self,
        *,
        name: str | None,
        hz: float,
        line: bool,
        history: bool = True,
        listeners: Sequence[Callable[[Sample], None]] = (),
        root: Path | None,
        command: tuple[str, ...] | None = None,
    ) -> None:
        period_of(hz)  # before there is a folder
        run = this_run(name, time_s=time.time())
        if command is not None:
            run = replace(run, command=command)
        self.pid = os.getpid()
        self.name = run.name
        self.is_suspended = self.is_closed = False
        self.folder = create_run(run, root)
        self.reporter = Reporter(self.folder / CHANNEL_FILE)
        self.num_open = 0  # `with` blocks
        self.end: tuple[str, int] | None = None  # how the script ended, and its exit code
        self.on_own_report: Callable[[], None] | None = None  # the job reports itself: nobody else must
        self._closers: list[Callable[[], None]] = []
        self.sampler: Sampler | None = None
        self._shown: LineWriter | None = None
        if run.rank not in (None, 0):
            return
        shown = LineWriter()
        self.sampler = Sampler(
            hz=hz,
            job=self.folder,
            listeners=listeners,
            on_failure=lambda failure: shown.say(f"flatout: {failure}; {CONSEQUENCE}"),
        )
        if history:
            writer = HistoryWriter(self.folder)
            self.sampler.listeners.append(writer)
            self._closers.append(writer.close)
        if line:
            recent = self.sampler.recent
            shown.listen()
            self.sampler.listeners.append(lambda sample: shown.write(recent(LINE_SPAN_S)))
        self._shown = shown
        self.sampler.start()

    def own_reporter(self) -> Reporter:
        """Return the reporter, for a job that reports its own steps."""
        self.resume()
        if self.on_own_report is not None:
            self.on_own_report()
            self.on_own_report = None
        return self.reporter

    def takes(self, *, name: str | None, root: Path | None) -> bool:
        """Return whether a `watch` with these options means this run."""
        is_here = (root or runs_folder()).absolute() == self.folder.parent.absolute()
        return name in (None, self.name) and is_here and self.folder.is_dir()

    def suspend(self, end: tuple[str, int] | None = None) -> None:
        """End the run for now; `resume` continues it.  `end` is how it ended and its exit code, if known."""
        if os.getpid() != self.pid or self.is_suspended:
            return
        self.is_suspended = True
        self.reporter.pause()
        self.reporter.write(ended=True)
        if self.sampler is not None:
            self.sampler.pause()
        if self._shown is not None:
            with contextlib.suppress(OSError):
                self._shown.close()
        with contextlib.suppress(OSError, BadInput):
            how, exit_code = end or self.end or (None, None)
            end_run(self.folder, time_s=time.time(), end=how, exit_code=exit_code)

    def resume(self) -> None:
        """Continue a run that was suspended."""
        if self.is_closed or not self.is_suspended:
            return
        with contextlib.suppress(OSError, BadInput):  # the job goes on, whatever became of the folder
            write_run(self.folder, replace(read_run(self.folder), ended_s=None, end=None, exit_code=None))
        self.is_suspended = False
        self.reporter.write()
        if self.sampler is not None:
            self.sampler.start()

    def close(self) -> None:
        if os.getpid() != self.pid:
            return
        self.suspend(_uncaught())
        self.is_closed = True
        self.reporter.close()
        if self.sampler is not None:
            self.sampler.stop()
        for close in self._closers:
            with contextlib.suppress(OSError):
                close()


def _uncaught() -> tuple[str, int] | None:
    """Return how the process ends if an error ends it; None if that is not known, as of `sys.exit`."""
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # a shell or a notebook outlives its errors
        return None
    return end_of(error)


_run: WatchedRun | None = None
_warned = False


class Watch(Generic[Batch]):
    """A loop under watch: iterate over it, or call `step`; see the module for both."""

    def __init__(self, iterable: Iterable[Batch] | None, run: WatchedRun | None) -> None:
        self._iterable = iterable
        self.run = run  # None: nothing could be set up, and the job runs unwatched

    @property
    def folder(self) -> Path | None:
        """Where the run is kept; None for a job that runs unwatched."""
        return None if self.run is None else self.run.folder

    @property
    def latest(self) -> Sample | None:
        """The last sample that was taken."""
        sampler = None if self.run is None else self.run.sampler
        return None if sampler is None else sampler.latest

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        if self._iterable is None:
            raise BadInput("this watch has nothing to iterate over", hint="flatout.watch(loader)")
        if self.run is None:
            yield from self._iterable
            return
        reporter = self.run.own_reporter()
        reporter.begin()
        try:
            reporter.before_wait()  # starting the workers of a loader is a wait for data
            try:
                source = iter(self._iterable)
            finally:
                reporter.after_wait()
            while True:
                batch = None
                reporter.before_wait()
                try:
                    batch = next(source)
                except StopIteration:
                    return
                finally:
                    reporter.after_wait(batch)
                yield batch
                if not reporter.is_explicit:
                    reporter.step()
        finally:
            reporter.pause()

    def step(self, *, loss: Any = None, lr: Any = None, samples: int | None = None) -> None:
        """Count a step that has ended.  A loss on the GPU is read later, without waiting for it.

        `samples` are the rows it took, if the job does not iterate over this watch.
        """
        if self.run is None:
            return
        reporter = self.run.own_reporter()
        if not reporter.is_explicit:
            reporter.restart_count()
        reporter.step(loss=loss, learning_rate=lr, samples=samples)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the step by the host's clock: wait, transfer, forward, backward or optimizer."""
        if name not in NAMED:
            raise BadInput(f"no phase {name!r}", hint=f"one of {', '.join(NAMED)}")
        return contextlib.nullcontext() if self.run is None else _timed(self.run.reporter, NAMED.index(name))

    def __enter__(self) -> Watch[Batch]:
        if self.run is not None:
            self.run.num_open += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.run is not None:
            self.run.num_open -= 1
            if not self.run.num_open:
                self.run.suspend(end_of(error))


@contextlib.contextmanager
def _timed(reporter: Reporter, region: int) -> Iterator[None]:
    reporter.enter(region)
    try:
        yield
    finally:
        reporter.leave()


def watch(
    iterable: Iterable[Batch] | None = None,
    *,
    name: str | None = None,
    hz: float = 1.0,
    line: bool = True,
    history: bool = True,
    listeners: Sequence[Callable[[Sample], None]] = (),
    folder: Path | None = None,
) -> Watch[Batch]:
    """Watch this job; `iterable` is its loader.

    Take `hz` samples per second; `line` shows the live line, `history` keeps the log.  Every sample goes to
    `listeners`, sinks included; an error in one is reported once and affects nothing else.  Runs are kept in
    `folder`, by default .flatout/runs.  The options of the first call hold for the whole run.
    """
    run = begin_run(name=name, hz=hz, line=line, history=history, listeners=listeners, root=folder)
    return Watch(iterable, run)


def begin_run(**options: Any) -> WatchedRun | None:
    """Start the run of this process, or continue it; if it cannot be kept, say so once and return None."""
    global _run, _warned
    if _run is not None and _run.pid != os.getpid():
        _run = None
    if _run is not None and _run.is_suspended:
        if _run.takes(name=options["name"], root=options["root"]):
            _run.resume()
        else:
            end_watching()
    if _run is None:
        try:
            _run = WatchedRun(**options)
        except OSError as error:
            if not _warned:
                _warned = True
                print(
                    f"flatout: this job is not watched, because its run cannot be kept: {error} "
                    "(choose a folder with FLATOUT_RUNS)",
                    file=sys.stderr,
                )
        else:
            atexit.register(end_watching)
    return _run


def end_watching() -> None:
    """End the run of this process; a later `watch` begins another."""
    global _run
    run, _run = _run, None
    if run is not None:
        atexit.unregister(end_watching)
        run.close()
