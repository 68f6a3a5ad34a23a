"""The data path's side of the instruments: it runs in the process that fetches batches.

With `num_workers=0` that is the training process, else each worker process, started by fork, spawn or
forkserver.  Wrappers around the fetcher and its collate function time both; in a worker the figures travel
beside the batch through the loader's own queue and are stripped on arrival.  So no other channel is needed,
and the script need not make anything else picklable.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.ground.codec import decode, encode
from flatout.measure.clock import Clock, ident
from flatout.measure.evidence import Call, FetchLine
from flatout.measure.loading.call_profile import CallProfile
from flatout.measure.loading.fetch_stacks import FetchStacks
from flatout.measure.loading.lengths import is_padded, sample_lengths
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode

MARK = "\0flatout-batch"
MOST_LENGTH_BATCHES = 12  # per process; looking at every sample's length is not free
SAMPLED_FROM = 2  # batch of worker 0, after the profiled one
PROFILED_BATCH = 1  # of worker 0, counted from 0: after its first imports, before anything is timed

now = time.perf_counter


class CoreClock:
    """How a thread spends its time: running, queued for a core, or blocked, by storage for instance."""

    def __init__(self) -> None:
        self.in_worker = False
        self._owner: tuple[int, int] | None = None
        self._file: int | None = None

    def cpu_s(self) -> float:
        """Return the CPU time of a whole worker process, but of this thread alone in the training process."""
        return time.process_time() if self.in_worker else time.thread_time()

    def in_line_s(self) -> float:
        """Return the time this thread queued for a core, as Linux counts it; 0 elsewhere."""
        owner = (os.getpid(), threading.get_ident())
        try:
            if owner != self._owner:  # the file belongs to the thread that opened it
                if self._file is not None:
                    os.close(self._file)
                self._owner, self._file = owner, None
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9 if self._file is not None else 0.0
        except (OSError, IndexError, ValueError):
            return 0.0


CORES = CoreClock()


@dataclass(kw_only=True, slots=True)
class BatchTimes:
    """What the process that made a batch knows about it."""

    worker: int | None = None
    fetch_s: float = 0.0
    collate_s: float = 0.0
    cpu_s: float = 0.0  # of fetching and collating
    blocked_s: float = 0.0  # of that, neither running nor queued for a core
    done_at_s: float = 0.0
    lengths: list[int] | None = None
    calls: tuple[Call, ...] = ()
    lines: tuple[FetchLine, ...] = ()
    sampled: bool = False  # made while its stack was sampled: not timed
    apart_s: float = 0.0  # our own work, in the process that made it

    def pack(self) -> str:
        return json.dumps(
            [
                *(self.worker, self.fetch_s, self.collate_s, self.cpu_s, self.blocked_s, self.done_at_s),
                *(self.lengths, encode(self.calls), encode(self.lines), self.sampled),
            ]
        )

    @classmethod
    def unpack(cls, text: str) -> BatchTimes:
        *figures, calls, lines, sampled = json.loads(text)
        worker, fetch_s, collate_s, cpu_s, blocked_s, done_at_s, lengths = figures
        return cls(
            worker=worker,
            fetch_s=fetch_s,
            collate_s=collate_s,
            cpu_s=cpu_s,
            blocked_s=blocked_s,
            done_at_s=done_at_s,
            lengths=lengths,
            calls=tuple(decode(Call, call) for call in calls),
            lines=tuple(decode(FetchLine, line) for line in lines),
            sampled=sampled,
        )


@dataclass(slots=True)
class FetchLog:
    """The batch that this process is making."""

    times: BatchTimes = field(default_factory=BatchTimes)
    num_length_batches: int = 0
    profile: CallProfile | None = None
    stacks: FetchStacks | None = None
    clock: Clock | None = None  # of the training process

    @contextlib.contextmanager
    def collating(self) -> Iterator[None]:
        instruments = [each for each in (self.profile, self.stacks) if each is not None]
        for instrument in instruments:
            instrument.in_collate = True
        try:
            yield
        finally:
            for instrument in instruments:
                instrument.in_collate = False

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Exclude our own work while a batch is made."""
        on_clock = self.clock is not None and ident() == self.clock.owner
        start = now()
        with self.clock.excluded() if self.clock is not None and on_clock else contextlib.nullcontext():
            yield
        self.times.apart_s += now() - start

    def take(self) -> BatchTimes:
        times, self.times = self.times, BatchTimes()
        times.done_at_s = now()
        return times

    def reset(self) -> None:
        self.times, self.num_length_batches = BatchTimes(), 0
        self.profile = self.stacks = self.clock = None


LOG = FetchLog()


def timed_collate(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrapped(samples: Any) -> Any:
        times = LOG.times
        with LOG.apart():
            lengths = _lengths(samples)
        start = now()
        try:
            with LOG.collating():
                batch = collate(samples)
        finally:
            times.collate_s += now() - start
        if lengths is not None:
            with LOG.apart():
                times.lengths = lengths if is_padded(batch, lengths) else None
        return batch

    return wrapped


def _lengths(samples: Any) -> list[int] | None:
    if LOG.num_length_batches >= MOST_LENGTH_BATCHES or not isinstance(samples, Sequence) or len(samples) < 2:
        return None
    LOG.num_length_batches += 1
    return sample_lengths(samples)


def timed_fetch(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrapped(index: Any) -> Any:
        times, profile, stacks = LOG.times, LOG.profile, LOG.stacks
        if profile is not None:
            profile.start()
        if stacks is not None:
            stacks.begin()
        in_line_s, cpu_s = CORES.in_line_s(), CORES.cpu_s()
        start, before_s = now(), times.collate_s + times.apart_s
        try:
            return fetch(index)
        finally:
            spent_s, cpu_s = now() - start, CORES.cpu_s() - cpu_s
            times.fetch_s += spent_s - (times.collate_s + times.apart_s - before_s)
            times.cpu_s += cpu_s
            times.blocked_s += max(0.0, spent_s - cpu_s - (CORES.in_line_s() - in_line_s))
            if profile is not None:
                profile.stop()
                times.calls = profile.calls()
                LOG.profile = None
            if stacks is not None:
                times.lines, times.sampled = stacks.end(), True
                if stacks.is_enough:
                    stacks.stop()
                    LOG.stacks = None

    return wrapped


def patch_fetchers(patches: Patches) -> None:
    """Patch fetchers where they are created, in the process that uses them: nothing has to be pickled."""
    from torch.utils.data._utils import fetch

    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        before = kind.__init__
        if getattr(before, "_flatout", False):
            continue

        def __init__(
            self: Any, dataset: Any, auto: bool, collate: Any, drop: bool, *, _before: Any = before
        ) -> None:
            _before(self, dataset, auto, timed_collate(collate), drop)
            self.fetch = timed_fetch(self.fetch)

        __init__._flatout = True  # type: ignore[attr-defined]
        patches.replace(kind, "__init__", __init__)


class TimedQueue:
    """The worker's result queue; a batch leaves as (mark, batch, figures)."""

    def __init__(self, queue: Any, worker: int, folder: str, *, profiles: bool, samples: bool) -> None:
        self._queue, self._worker, self._folder = queue, worker, folder
        self._profiles, self._samples = profiles and worker == 0, samples and worker == 0
        self._num_batches = 0

    def put(self, item: Any) -> None:
        from torch._utils import ExceptionWrapper
        from torch.utils.data._utils.worker import _IterableDatasetStopIteration

        index, data = item
        times = LOG.take()
        if isinstance(index, int) and not isinstance(
            data, (ExceptionWrapper, _IterableDatasetStopIteration, type(None))
        ):
            times.worker = self._worker
            item = (index, (MARK, data, times.pack()))
            self._num_batches += 1
            if self._profiles and self._num_batches == PROFILED_BATCH:
                LOG.profile = CallProfile(UserCode(self._folder))
            if self._samples and self._num_batches == SAMPLED_FROM:
                LOG.stacks = FetchStacks(UserCode(self._folder))
        self._queue.put(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def unwrap(data: Any) -> tuple[Any, BatchTimes | None]:
    """Return (batch, figures); pinning has turned the tuple into a list."""
    if isinstance(data, (tuple, list)) and len(data) == 3 and isinstance(data[0], str) and data[0] == MARK:
        return data[1], BatchTimes.unpack(data[2])
    return data, None


class WorkerLoop:
    """Replaces torch's worker loop; spawn and forkserver pickle it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        # of workers that start from here on:
        self.looks = True  # whether they look at what they do, which slows their batches
        self.samples = True  # whether they sample their stacks

    def __call__(self, kind: Any, dataset: Any, index_queue: Any, data_queue: Any, *rest: Any) -> None:
        LOG.reset()
        CORES.in_worker = True
        patch_fetchers(Patches())
        worker = int(rest[6]) if len(rest) > 6 and isinstance(rest[6], int) else os.getpid()
        if not self.looks:
            LOG.num_length_batches = MOST_LENGTH_BATCHES
        results = TimedQueue(
            data_queue, worker, self.folder, profiles=self.looks, samples=self.looks and self.samples
        )
        real_loop()(kind, dataset, index_queue, results, *rest)


_REAL_LOOP: Callable[..., None] | None = None


def real_loop() -> Callable[..., None]:
    """Return torch's own worker loop, even while it is replaced."""
    global _REAL_LOOP
    from torch.utils.data._utils import worker

    if _REAL_LOOP is None or not isinstance(worker._worker_loop, WorkerLoop):
        _REAL_LOOP = worker._worker_loop
    return _REAL_LOOP
