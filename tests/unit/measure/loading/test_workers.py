from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import fetch, worker

from flatout.measure.clock import Clock
from flatout.measure.evidence import Call, Place
from flatout.measure.loading import workers
from flatout.measure.loading.call_profile import CallProfile
from flatout.measure.loading.loaders import LoaderWatch
from flatout.measure.loading.workers import (
    LOG,
    MARK,
    BatchTimes,
    TimedQueue,
    WorkerLoop,
    patch_fetchers,
    unwrap,
)
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode
from tests.support.measure import line_of

HERE = Path(__file__)
FETCH_S, COLLATE_S = 2e-3, 1e-3  # per sample and per batch, spent on purpose
BATCH = 4


def spend(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Ragged(Dataset[Any]):
    """Samples of growing length that take a known time to make; `fails_at` raises."""

    def __init__(self, num: int, fails_at: int | None = None) -> None:
        self.num, self.fails_at = num, fails_at

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        if index == self.fails_at:
            raise KeyError(f"sample {index} is broken")
        spend(FETCH_S)
        return np.ones(index % BATCH + 1, dtype=np.float32)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(8.0)


def glue(samples: list[Any]) -> torch.Tensor:
    spend(COLLATE_S)
    longest = max(len(sample) for sample in samples)
    batch = np.zeros((0, longest), dtype=np.float32)
    for sample in samples:
        batch = np.concatenate([batch, np.pad(sample, (0, longest - len(sample)))[None]])  # at: glue
    return torch.from_numpy(batch)


@pytest.fixture
def watch() -> Iterator[LoaderWatch]:
    watch = LoaderWatch(Clock(), UserCode(str(HERE.parent)))
    patches = Patches()
    LOG.reset()
    watch.install(patches)
    yield watch
    patches.undo()


figures = st.floats(0, 1e6)
calls = st.builds(
    Call,
    function=st.text(max_size=9),
    place=st.builds(
        Place, file=st.text(max_size=9), line=st.integers(1, 9999), function=st.none() | st.text()
    ),
    in_collate=st.booleans(),
    calls_per_batch=figures,
)
times = st.builds(
    BatchTimes,
    worker=st.none() | st.integers(0, 99),
    fetch_s=figures,
    collate_s=figures,
    cpu_s=figures,
    blocked_s=figures,
    done_at_s=figures,
    lengths=st.none() | st.lists(st.integers(0, 10_000), max_size=8),
    calls=st.lists(calls, max_size=3).map(tuple),
)


@given(times=times)
def test_figures_survive_the_queue(times: BatchTimes) -> None:
    assert BatchTimes.unpack(times.pack()) == times
    assert unwrap((MARK, "batch", times.pack())) == ("batch", times)
    # pinning turns tuples into lists
    assert unwrap([MARK, "batch", times.pack()]) == ("batch", times)


@pytest.mark.parametrize("data", [None, 3, (1, 2, 3), [torch.zeros(1)] * 3, ("a", "b", "c"), (MARK, "batch")])
def test_a_batch_without_figures_is_left_alone(data: Any) -> None:
    assert unwrap(data) == (data, None)
    assert unwrap(data)[0] is data


def test_fetch_and_collate_are_timed_apart_in_the_training_process(watch: LoaderWatch) -> None:
    batches = list(DataLoader(Ragged(8), batch_size=BATCH, collate_fn=glue))
    assert [tuple(batch.shape) for batch in batches] == [(4, 4), (4, 4)]
    (loader,) = watch.evidence()
    assert loader.fetch_s is not None and loader.collate_s is not None
    assert loader.fetch_s.num == 2
    assert loader.fetch_s.mean_s >= BATCH * FETCH_S
    assert loader.collate_s.mean_s >= COLLATE_S
    # what collate spends is not fetch's: the two never overlap
    assert loader.epochs[0].first_wait_s >= BATCH * FETCH_S + COLLATE_S
    assert loader.workers == ()


class Stored(Dataset[Any]):
    """Samples that wait for their storage, but for the odd ones, which are computed."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        if index % 2 == 0:
            time.sleep(0.05)
        end = time.thread_time() + (0.005 if index % 2 else 0.0)
        while time.thread_time() < end:
            pass
        return float(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_time_on_a_core_is_told_from_waiting(watch: LoaderWatch, num_workers: int) -> None:
    list(DataLoader(Stored(), batch_size=2, num_workers=num_workers))
    (loader,) = watch.evidence()
    assert loader.fetch_s is not None and loader.cpu_s is not None and loader.blocked_s is not None
    assert loader.cpu_s >= 0.005
    # what counts as queued for a core on a busy machine is not blocked
    assert 0.02 < loader.blocked_s <= loader.fetch_s.mean_s + 1e-3
    assert [worker.blocked_s for worker in loader.workers] == [loader.blocked_s] * num_workers


def test_a_batch_that_was_ready_is_not_late(watch: LoaderWatch) -> None:
    kept: Any = iter(DataLoader(Ragged(16), batch_size=BATCH, num_workers=1, collate_fn=glue))
    next(kept)
    for _batch in range(3):
        while not kept._data_queue.qsize():  # until the worker has finished one
            pass
        next(kept)
    (ready,) = watch.evidence()
    assert (ready.late_s, ready.wait_s is not None) == (0.0, True)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_two_workers_send_their_figures_beside_the_batch(watch: LoaderWatch, start: str) -> None:
    loader = DataLoader(
        Ragged(16), batch_size=BATCH, num_workers=2, collate_fn=glue, multiprocessing_context=start
    )
    batches = list(loader)
    assert all(isinstance(batch, torch.Tensor) and batch.shape == (4, 4) for batch in batches)
    (found,) = watch.evidence()
    assert [(each.worker, each.num_batches) for each in found.workers] == [(0, 2), (1, 2)]
    for each in found.workers:
        assert each.fetch_s >= BATCH * FETCH_S
        assert each.collate_s >= COLLATE_S
        assert each.queue_age_s >= 0
    assert found.lengths is not None
    assert (found.lengths.num_samples, found.lengths.max) == (16, 4)
    assert found.lengths.padded_share == pytest.approx(6 / 16)
    by_function = {call.function: call for call in found.calls}
    assert by_function["numpy.concatenate"].place == Place(
        file=HERE.name, line=line_of(HERE, "glue"), function="glue"
    )
    assert by_function["numpy.concatenate"].calls_per_batch == BATCH
    assert by_function["numpy.concatenate"].in_collate


def test_the_batches_are_those_of_an_unwatched_loader(watch: LoaderWatch) -> None:
    def seen() -> list[Any]:
        torch.manual_seed(0)
        loader = DataLoader(Ragged(12), batch_size=BATCH, shuffle=True, num_workers=2, collate_fn=glue)
        return [batch.tolist() for batch in loader]

    watched = seen()
    watch.pid = -1  # every loader of this process is somebody else's
    assert seen() == watched


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_the_dataset_reaches_the_script(watch: LoaderWatch, num_workers: int) -> None:
    loader = DataLoader(Ragged(8, fails_at=5), batch_size=BATCH, num_workers=num_workers, collate_fn=glue)
    batches = iter(loader)
    next(batches)
    with pytest.raises(KeyError, match="sample 5 is broken"):
        next(batches)
    assert list(batches) == []  # ends the workers: left to the garbage collector they take seconds


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterable_dataset_ends_where_it_would(watch: LoaderWatch, num_workers: int) -> None:
    loader = DataLoader(Stream(), batch_size=3, num_workers=num_workers)
    assert [len(batch) for batch in loader] == [3, 3, 2]
    (found,) = watch.evidence()
    assert found.fetch_s is not None
    assert found.fetch_s.num >= 2  # the third is made under looks at its stack


def test_a_profile_is_taken_of_one_batch_only(watch: LoaderWatch) -> None:
    LOG.profile = CallProfile(watch.user_code)
    list(DataLoader(Ragged(12), batch_size=BATCH, collate_fn=glue))
    assert LOG.profile is None
    (found,) = watch.evidence()
    assert {call.function: call.calls_per_batch for call in found.calls}["numpy.concatenate"] == BATCH


def test_fetchers_are_wrapped_once_and_given_back() -> None:
    before = fetch._MapDatasetFetcher.__init__
    patches, again = Patches(), Patches()
    patch_fetchers(patches)
    wrapped = fetch._MapDatasetFetcher.__init__
    patch_fetchers(again)
    assert fetch._MapDatasetFetcher.__init__ is wrapped
    again.undo()
    assert fetch._MapDatasetFetcher.__init__ is wrapped
    patches.undo()
    assert fetch._MapDatasetFetcher.__init__ is before


def test_the_worker_loop_travels_to_spawned_workers() -> None:
    assert pickle.loads(pickle.dumps(WorkerLoop("/job"))).folder == "/job"  # noqa: S301


def test_torchs_own_loop_is_found_behind_ours(watch: LoaderWatch) -> None:
    assert isinstance(worker._worker_loop, WorkerLoop)
    assert workers.real_loop().__module__ == "torch.utils.data._utils.worker"


class Queue:
    """A queue as a worker sees it."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, item: Any) -> None:
        self.items.append(item)

    def cancel_join_thread(self) -> str:
        return "cancelled"


def test_what_is_no_batch_passes_the_queue_unchanged() -> None:
    from torch._utils import ExceptionWrapper

    queue = Queue()
    timed = TimedQueue(queue, 0, str(HERE.parent), profiles=True, samples=True)
    failure = ExceptionWrapper((ValueError, ValueError("x"), None))
    passed = [(0, failure), (worker._ResumeIteration(), None), (1, None)]
    for item in passed:
        timed.put(item)
    assert queue.items == passed
    assert timed.cancel_join_thread() == "cancelled"
    timed.put((2, "batch"))
    index, (mark, batch, text) = queue.items[-1]
    assert (index, mark, batch) == (2, MARK, "batch")
    assert BatchTimes.unpack(text).worker == 0
    LOG.reset()
