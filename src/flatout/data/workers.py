"""How many loader workers a dataset needs, measured.

Workers help where making a batch takes long: they overlap it with the step.  They cost processes, memory and
the transfer of every batch, so for data in memory none is often fastest, and more workers than cores never
help.  The number of cores does not tell which is best; a few seconds of trials do.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
from torch.utils.data import DataLoader

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.ground.units import show_bytes, show_seconds
from flatout.hardware.host import HostFacts, read_host
from flatout.measure.batches import num_bytes

NUM_ROUNDS = 3
NEAR = 1.05  # within this factor of the fastest, fewer workers are chosen
MEMORY_SHARE = 0.8  # of what is free, the most that workers may take
PREFETCH_FACTOR = 2  # DataLoader's default
MIN_BATCHES = 4


@dataclass(kw_only=True, slots=True)
class WorkerTrials:
    """What was measured of one number of workers."""

    workers: int
    batch_s: list[float] = field(default_factory=list)  # per round: mean seconds per batch
    worker_bytes: int | None = None  # memory that one worker has to itself
    batch_bytes: int = 0
    skipped: str | None = None

    @property
    def load_s(self) -> float:
        return statistics.median(self.batch_s)

    def step_s(self, step_s: float | None) -> float:
        """Return a training step's time: without workers it loads first, with them at the same time."""
        if step_s is None:
            return self.load_s
        return step_s + self.load_s if self.workers == 0 else max(step_s, self.load_s)


def choose_workers(
    dataset: Any,
    batch_size: int | None = None,
    *,
    step_s: float | None = None,
    candidates: Sequence[int] | None = None,
    seconds: float = 20.0,
    loader: Callable[..., Any] = DataLoader,
    **loader_options: Any,
) -> Decision[int]:
    """Choose the number of workers that feeds a training step fastest, by interleaved trials.

    `step_s` is the time of a step without its loader; with it the choice is the fewest workers that hide
    the loading behind it.  `candidates` default to 0, 1, 2, 4, ... up to the cores this process may use.
    `loader` is the loader's class (`DataLoader`, or torchdata's `StatefulDataLoader`); `loader_options` go
    to it unchanged.
    """
    if batch_size is not None:
        loader_options["batch_size"] = batch_size
    host = read_host()
    trials = [WorkerTrials(workers=workers) for workers in _candidates(candidates, host)]

    queued = loader_options.get("prefetch_factor") or PREFETCH_FACTOR

    def make(workers: int) -> Any:
        unfit = () if workers else ("prefetch_factor", "persistent_workers")
        options = {name: value for name, value in loader_options.items() if name not in unfit}
        return loader(dataset, num_workers=workers, **options)

    trial_s = seconds / (NUM_ROUNDS * len(trials))
    for _ in range(NUM_ROUNDS):
        for each in trials:
            each.skipped = each.skipped or _does_not_fit(each.workers * queued, each.workers, trials, host)
            if each.skipped is None:
                _run(each, make, num_warm=each.workers * queued + 1, trial_s=trial_s)
    return _decide(trials, host, step_s)


def _candidates(candidates: Sequence[int] | None, host: HostFacts) -> list[int]:
    if candidates is not None:
        if not candidates or min(candidates) < 0:
            raise BadInput(f"candidates={list(candidates)}", hint="give at least one number of workers")
        return sorted(set(candidates))
    cores = max(1, math.floor(host.cores or 1))
    return sorted({0, *(2**i for i in range(cores.bit_length())), cores})


def _run(trials: WorkerTrials, make: Callable[[int], Any], *, num_warm: int, trial_s: float) -> None:
    """Run one trial: skip the batches that start-up and prefetching hide, then time some more."""
    batches = iter(make(trials.workers))
    warm = list(itertools.islice(batches, num_warm))
    if not warm:
        raise BadInput("the loader gives no batch to measure", hint="give a dataset with at least one batch")
    trials.batch_bytes = max(num_bytes(batch) for batch in warm)
    del warm
    times = [time.perf_counter()]
    for _ in batches:
        times.append(time.perf_counter())
        if times[-1] - times[0] > trial_s and len(times) > MIN_BATCHES:
            break
    if len(times) <= 1:
        trials.skipped = f"an epoch is over in the {num_warm} batches that are loaded ahead"
        return
    trials.worker_bytes = _worker_bytes() if trials.workers else None
    trials.batch_s.append((times[-1] - times[0]) / (len(times) - 1))
    shutdown = getattr(batches, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


def _worker_bytes() -> int | None:
    """Return the most memory that a child process has to itself."""
    found = []
    for child in psutil.Process().children():
        try:
            found.append(int(child.memory_full_info().uss))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return max(found, default=None)


def _does_not_fit(queued: int, workers: int, trials: Sequence[WorkerTrials], host: HostFacts) -> str | None:
    """Say why this many workers would not fit, judging by fewer; None if they would."""
    known = [each for each in trials if each.batch_s]
    if not workers or not known:
        return None
    queued_bytes = queued * max(each.batch_bytes for each in known)
    if host.shm_free_bytes is not None and queued_bytes > MEMORY_SHARE * host.shm_free_bytes:
        return f"{show_bytes(queued_bytes)} of batches, /dev/shm has {show_bytes(host.shm_free_bytes)}"
    per_worker = max((each.worker_bytes for each in known if each.worker_bytes), default=None)
    if per_worker is None or host.memory_bytes is None or host.memory_used_bytes is None:
        return None
    needed, free = workers * per_worker + queued_bytes, host.memory_bytes - host.memory_used_bytes
    if needed > MEMORY_SHARE * free:
        return f"{show_bytes(needed)} of memory, {show_bytes(free)} are free"
    return None


def _decide(trials: Sequence[WorkerTrials], host: HostFacts, step_s: float | None) -> Decision[int]:
    measured = [each for each in trials if each.batch_s]
    if not measured:
        raise BadInput(
            "no number of workers could be measured: " + "; ".join(str(each.skipped) for each in trials)
        )
    fastest_s = min(each.step_s(step_s) for each in measured)
    chosen = next(each for each in measured if each.step_s(step_s) <= NEAR * fastest_s)
    table = ", ".join(f"{each.workers}: {show_seconds(each.load_s)}" for each in measured)
    reason = f"seconds per batch by workers are {table}"
    if step_s is not None:
        reason += (
            f"; with a step of {show_seconds(step_s)} that is {show_seconds(chosen.step_s(step_s))} per step"
        )
    if host.cores is not None:
        reason += f"; {host.cores:g} cores ({host.cores_limited_by})"
    for each in trials:
        if each.skipped is not None:
            reason += f"; {each.workers} not tried: {each.skipped}"
    return Decision(value=chosen.workers, reason=reason, source="measured")
