"""Steps whose batches come from another number of worker processes.

The arm starts a second DataLoader outside the timed steps, over the same dataset, with the same collate
function and batches of the job's own sampler, and puts it in place of the job's.  Its queue fills before the
steps begin, and a few steps would only see what the queue holds.  So it hands out batches no faster than the
workers can sustain: at the pace at which they made batches when asked without a pause, and at which the cores
can do the work of the workers and the training process together.

Workers that wait for storage leave their core to others, so more workers than cores may pay off.  If making a
batch takes less time than waiting for it, sending it between processes takes the time: then the training
process makes it itself, without workers.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.clock import now
from flatout.measure.evidence import Place
from flatout.measure.loading.loaders import LoaderWatch
from flatout.measure.loading.workers import LOG

STREAM = "a stream cannot be read by other workers"
LEAST_SHARE = 0.05  # of the step, waiting
MOST_OF_TIME = 0.25  # of the time left, for starting workers
MOST_PER_CORE = 4  # workers per core, if they block
BLOCKED = 0.5  # of a batch's time: above it, a worker leaves its core to others
MOST_INDICES = 1024  # batches of the job's sampler; then they repeat
LONGEST_S = 30.0  # for the first batch
LONGEST_LATER_S, MANY = 4.0, 10  # for any later batch: seconds, and as a multiple of the pace
PACE_S, SURE_S = 2.0, 0.25  # for finding the pace: at most, unless workers are many, and at least


class StandIn(Arm):
    """Steps whose batches come from a stand-in for the training loader."""

    serves = "cached"  # by the stand-in

    def __init__(self, loaders: LoaderWatch, *, suspicion: float, place: Place | None) -> None:
        self.suspicion, self.place = suspicion, place
        self._loaders = loaders
        self._is_started = False

    def begin(self) -> None:
        if not self._is_started:
            self._is_started = True
            loader = self._loaders.training_loader()
            if loader is None:
                self.refusal = "the training loader is gone"
            else:
                self._start(loader)
        if self.refusal is None:
            self._loaders.stand_in = self._next

    def end(self) -> None:
        self._loaders.stand_in = None

    def release(self) -> None:
        self._loaders.stand_in = None

    def _start(self, loader: Any) -> None:
        """Prepare the stand-in, or set `refusal`."""
        raise NotImplementedError

    def _next(self) -> Any | None:
        """Return the next batch; None if the job's loader has to serve it."""
        raise NotImplementedError


class Workers(StandIn):
    """The training loader with `num_workers` worker processes."""

    kind = "workers"

    def __init__(
        self,
        loaders: LoaderWatch,
        *,
        num_workers: int,
        cores: float | None,
        suspicion: float,
        place: Place | None = None,
    ) -> None:
        super().__init__(loaders, suspicion=suspicion, place=place)
        self.label, self.value = f"workers={num_workers}", float(num_workers)
        self._num_workers = num_workers
        self._pid = os.getpid()
        self._cores = cores
        self._iterator: Any = None
        self._cpu_s: list[float] = []  # of the workers, per batch
        self._period_s = self._pace_s = 0.0
        self._due_s = 0.0
        self._process_s = 0.0
        self._num_taken = 0  # batches in this step

    def begin(self) -> None:
        super().begin()
        self._process_s, self._due_s, self._num_taken = time.process_time(), now(), 0

    def step_end(self) -> None:
        """Compute the sustainable pace once the training process's own work per batch is known.

        A step may take several batches, as in gradient accumulation, or none.
        """
        if not self._num_taken:
            return
        spent_s, self._process_s = time.process_time() - self._process_s, time.process_time()
        spent_s, self._num_taken = spent_s / self._num_taken, 0
        if self._cores and self._cpu_s:
            cpu_s = sum(self._cpu_s) / len(self._cpu_s)
            self._period_s = max(self._pace_s, (spent_s + cpu_s) / self._cores)

    def close(self) -> None:
        """End the worker processes."""
        if os.getpid() != self._pid:
            return  # a fork of the job: dropping the iterator would end the job's workers
        iterator, self._iterator = self._iterator, None
        if iterator is not None and self._num_workers:
            iterator._shutdown_workers()

    def _start(self, loader: Any) -> None:
        self._loaders.unwatched = True
        try:
            with random_numbers_kept():
                self._iterator = iter(_with_workers(loader, self._num_workers))
                if self._num_workers:
                    self._find_pace()
        except Exception as error:  # noqa: BLE001 - the dataset's own, in another process
            reason = str(error).strip().splitlines()
            self.refusal = f"the workers did not start: {reason[-1] if reason else type(error).__name__}"
            self.close()
        finally:
            self._loaders.unwatched = False

    def _find_pace(self) -> None:
        for _ in range(self._num_workers):
            self._take()  # once these arrive, the workers have started
        self._cpu_s.clear()  # a worker's first batch takes longer
        start, num = now(), 0
        few = 2 * self._num_workers
        while now() - start < SURE_S or (num < few and (num < self._num_workers or now() - start < PACE_S)):
            self._take()
            num += 1
        self._pace_s = self._period_s = (now() - start) / num
        self._iterator._timeout = max(LONGEST_LATER_S, MANY * self._pace_s)  # before the block is given up

    def _take(self) -> Any:
        batch = next(self._iterator)
        times = getattr(self._iterator, "_flatout_times", None)
        if times is not None:
            self._cpu_s.append(times.cpu_s)
        if not self._num_workers:
            LOG.take()  # made in this process, not by the job's loader
        return batch

    def _next(self) -> Any | None:
        if self.refusal is not None:
            return None
        time.sleep(max(0.0, self._due_s - now()))
        self._due_s = max(self._due_s, now()) + self._period_s
        self._num_taken += 1
        try:
            return self._take()
        except Exception as error:  # noqa: BLE001 - the dataset's own: the job's loader goes on
            self.refusal = f"a worker failed: {type(error).__name__}"
            return None


class Again:
    """Index batches of a loader's own sampler, repeated without end."""

    def __init__(self, loader: Any) -> None:
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        own = copy.deepcopy(sampler, {id(loader.dataset): loader.dataset})
        self.batches = list(itertools.islice(own, MOST_INDICES))

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self.batches)


def _with_workers(loader: Any, num_workers: int) -> Any:
    """Build a DataLoader like `loader` with another number of workers."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(STREAM)
    again = Again(loader)
    in_batches = loader.batch_sampler is not None
    options: dict[str, Any] = (
        {"batch_sampler": again} if in_batches else {"sampler": again, "batch_size": None}
    )
    if num_workers:
        options |= {
            "timeout": loader.timeout or LONGEST_S,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": True,
        }
    return DataLoader(
        loader.dataset,
        num_workers=num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=torch.Generator(),
        **options,
    )


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore the random state afterwards, so that the job draws the numbers it would have drawn."""
    import torch

    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    state = numpy.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(state)


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose arms if the step waits for its loader, or if more workers than cores compete."""
    record = context.loaders.trained_on()
    present = record.config.get("num_workers") if record is not None else None
    if record is None or present is None or not record.made:
        return
    cores = read_cores()
    wait_s = min(context.phases_s.get("wait", 0.0), context.step_s)
    share = wait_s / context.step_s
    if share < LEAST_SHARE and not (cores and present > cores):
        return
    # without its wait for a core, which fewer workers would free
    batch_s = sum(
        min(times.fetch_s + times.collate_s, times.cpu_s + times.blocked_s) for times, _ in record.made
    ) / len(record.made)
    blocked_s = sum(times.blocked_s for times, _ in record.made) / len(record.made)
    started_s = max((epoch.iter_s + epoch.first_wait_s for epoch in record.epochs), default=0.0)
    for num_workers in worker_counts(
        present=present,
        batch_s=batch_s,
        blocked_s=blocked_s,
        step_s=context.step_s - wait_s,
        wait_s=wait_s,
        cores=cores,
    ):
        arm = Workers(
            context.loaders,
            num_workers=num_workers,
            cores=cores,
            suspicion=max(share, LEAST_SHARE),
            place=record.place,
        )
        context.patches.on_undo(arm.close)
        if record.config.get("streams"):
            arm.refusal = STREAM
        elif present and started_s > MOST_OF_TIME * context.seconds_left:
            arm.refusal = f"starting workers takes {started_s:.0f} s, too long for the time left"
        yield arm


def read_cores() -> float | None:
    from flatout.hardware.host import read_host

    return read_host().cores


def worker_counts(
    *, present: int, batch_s: float, blocked_s: float, step_s: float, wait_s: float, cores: float | None
) -> tuple[int, ...]:
    """Return up to three numbers of workers to try.

    A worker needs `batch_s` per batch and is blocked for `blocked_s` of it; a step takes `step_s` without its
    loader and waits `wait_s` for it.
    """
    whole = max(1, math.floor(cores or 1))
    most = MOST_PER_CORE * whole if blocked_s > BLOCKED * batch_s else whole
    wanted = math.ceil(batch_s / step_s) if step_s > 0 else most
    tried = {min(most, max(1, wanted)), most}
    if present and batch_s < wait_s:
        tried = {0, min(most, max(1, wanted))}
    elif present and wanted > present:
        tried.add(min(most, 2 * present))
    return tuple(sorted(tried - {present}))
