from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flatout.measure.arms.arm import Arm
from flatout.measure.arms.batches import workers
from flatout.measure.arms.batches.workers import Workers, propose, worker_counts
from flatout.measure.evidence import EpochStart
from flatout.measure.loading.loaders import LoaderWatch
from flatout.measure.loading.workers import LOG, BatchTimes

Keep = Callable[..., Iterator[Any]]
Block = Callable[[Arm], None]


class Slow(Dataset[Any]):
    """Samples that wait for storage; `fails` in a worker only."""

    def __init__(self, *, seconds: float = 0.0, fails: bool = False) -> None:
        self.seconds, self.fails = seconds, fails

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        if self.fails and torch.utils.data.get_worker_info() is not None:
            raise OSError("no such file")
        time.sleep(self.seconds)
        return torch.tensor(float(index)), torch.utils.data.get_worker_info() is not None


class Looked(Slow):
    """Samples that tell whether their process looks at what makes them."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(LOG.profile is not None or LOG.stacks is not None)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(400.0))


def make(watch: LoaderWatch, **options: Any) -> Workers:
    return Workers(watch, **{"num_workers": 2, "cores": None, "suspicion": 0.5, **options})


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


def test_batches_come_from_the_workers_until_the_end(
    watch: LoaderWatch, begin: Block, end: Block, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = keep(DataLoader(Slow(), batch_size=4, shuffle=True))
    arm, before, processes = make(watch), states(), psutil.Process().children()
    num_loaders = len(watch.records)
    begin(arm)
    assert arm.refusal is None and states() == before
    for _ in range(3):
        samples, made_by_worker = next(batches)
        assert samples.shape == (4,) and made_by_worker.all()
        arm.step_end()
    end(arm)
    assert not next(batches)[1].any()
    begin(arm)  # another block, of the same workers
    assert next(batches)[1].all()
    end(arm)
    assert len(psutil.Process().children()) == len(processes) + 2
    monkeypatch.setattr(workers.os, "getpid", lambda: -1)
    arm.close()  # in a fork of the job
    monkeypatch.undo()
    begin(arm)
    assert next(batches)[1].all()
    end(arm)
    arm.close()
    assert psutil.Process().children() == processes
    assert len(watch.records) == num_loaders and not watch.unwatched


def test_batches_are_handed_out_at_the_pace_of_the_workers(
    watch: LoaderWatch, begin: Block, end: Block, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = keep(DataLoader(Slow(), batch_size=4))
    arm = make(watch, num_workers=1, cores=2.0)
    begin(arm)
    clock = [100.0]
    monkeypatch.setattr(workers, "now", lambda: clock[0])
    monkeypatch.setattr(workers.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(workers.time, "process_time", lambda: 0.0)
    arm._pace_s = arm._period_s = 0.25
    begin(arm)
    for _ in range(5):
        next(batches)
    assert clock[0] == pytest.approx(101.0)  # four batches after the first, though all lay in the queue
    clock[0] += 10.0
    next(batches)
    assert clock[0] == pytest.approx(111.0)
    arm._cpu_s[:] = [3.0]  # of a worker for each batch; the training process took 6 for six, on two cores
    monkeypatch.setattr(workers.time, "process_time", lambda: 6.0)
    arm.step_end()
    assert arm._period_s == pytest.approx(2.0)
    arm.step_end()  # without a batch: a step that accumulates
    next(batches)
    arm._cpu_s[:] = [3.0]
    monkeypatch.setattr(workers.time, "process_time", lambda: 8.0)
    arm.step_end()
    assert arm._period_s == pytest.approx(2.5)
    end(arm)
    arm.close()


def test_workers_of_the_arm_are_only_timed(
    watch: LoaderWatch, begin: Block, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at what a worker does slows its first batches, and these show its pace."""
    batches = keep(DataLoader(Looked(), batch_size=4))
    taken: list[Any] = []
    take = Workers._take
    monkeypatch.setattr(Workers, "_take", lambda self: taken.append(take(self)) or taken[-1])
    arm = make(watch, num_workers=1)
    begin(arm)
    arm.close()
    assert next(batches) is not None and len(taken) > 4
    assert not any(batch.any() for batch in taken)
    assert watch._worker_loop.looks  # those of the job's own loaders look


def test_without_workers_batches_are_made_here_by_the_jobs_sampler(
    watch: LoaderWatch, begin: Block, end: Block, keep: Keep
) -> None:
    batches = keep(DataLoader(Slow(), batch_size=4, shuffle=True))
    arm, before = make(watch, num_workers=0), states()
    begin(arm)
    assert arm.refusal is None and states() == before
    assert not next(batches)[1].any() and LOG.times == BatchTimes()
    arm.step_end()
    end(arm)
    arm.close()
    assert watch.stand_in is None


@pytest.mark.parametrize(
    ("data", "reason"),
    [(Slow(fails=True), "no such file"), (Stream(), "a stream cannot be read")],
    ids=["failing", "stream"],
)
def test_a_loader_that_workers_cannot_read_is_refused(
    watch: LoaderWatch, begin: Block, end: Block, keep: Keep, data: Any, reason: str
) -> None:
    batches = keep(DataLoader(data, batch_size=4))
    arm = make(watch, num_workers=1)
    begin(arm)
    assert arm.refusal is not None and reason in arm.refusal
    next(batches)
    end(arm)
    assert watch.stand_in is None and not watch.unwatched


def test_a_worker_that_fails_later_leaves_the_step_to_the_jobs_loader(
    watch: LoaderWatch, begin: Block, end: Block, keep: Keep
) -> None:
    batches = keep(DataLoader(Slow(), batch_size=4))
    arm = make(watch, num_workers=1)
    begin(arm)
    arm._iterator._shutdown_workers()
    arm._iterator = iter(())
    assert not next(batches)[1].any()
    assert arm.refusal is not None and "StopIteration" in arm.refusal
    end(arm)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"present": 0, "batch_s": 0.030, "blocked_s": 0.001, "step_s": 0.010, "cores": 8.0}, (3, 8)),
        ({"present": 0, "batch_s": 0.030, "blocked_s": 0.001, "step_s": 0.010, "cores": 2.0}, (2,)),
        ({"present": 2, "batch_s": 0.330, "blocked_s": 0.320, "step_s": 0.040, "cores": 2.0}, (4, 8)),
        ({"present": 8, "batch_s": 0.120, "blocked_s": 0.001, "step_s": 0.040, "cores": 2.0}, (2,)),
        ({"present": 16, "batch_s": 0.030, "blocked_s": 0.001, "step_s": 0.020, "cores": 16.0}, (2,)),
        ({"present": 2, "batch_s": 0.030, "blocked_s": 0.001, "step_s": 0.020, "cores": 2.0}, ()),
        (
            {"present": 4, "batch_s": 0.001, "blocked_s": 0, "step_s": 0.004, "wait_s": 0.003, "cores": 8.0},
            (0, 1),
        ),
    ],
    ids=[
        "as many as needed",
        "no more than cores",
        "waiting for storage",
        "waiting for cores",
        "fewer",
        "right",
        "sending takes longer than making",
    ],
)
def test_numbers_of_workers_to_try(facts: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert worker_counts(**{"wait_s": 0.0, **facts}) == expected


def test_a_step_that_waits_for_its_loader_is_proposed(
    watch: LoaderWatch, keep: Keep, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "read_cores", lambda: 4.0)
    batches = keep(DataLoader(Slow(), batch_size=4))
    record = watch.trained_on()
    assert record is not None
    record.made = [(BatchTimes(fetch_s=0.5, collate_s=0.1, cpu_s=0.6, blocked_s=0.0), 0.0)]
    arms = list(propose(context(phases_s={"wait": 0.6})))
    assert [(arm.label, arm.value, arm.suspicion) for arm in arms] == [
        ("workers=2", 2.0, 0.6),
        ("workers=4", 4.0, 0.6),
    ]
    assert not list(propose(context(phases_s={"wait": 0.01})))
    record.config["streams"] = True
    assert {arm.refusal for arm in propose(context(phases_s={"wait": 0.6}))} == {workers.STREAM}
    record.config |= {"streams": False, "num_workers": 8}
    record.epochs = [EpochStart(iter_s=20.0, first_wait_s=5.0)]
    (arm,) = [arm for arm in propose(context(phases_s={"wait": 0.6})) if arm.label == "workers=4"]
    assert arm.refusal is not None and "starting workers takes 25 s" in arm.refusal
    del batches
