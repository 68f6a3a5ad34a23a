from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from flatout.measure.evidence import EpochStart, Worker
from flatout.measure.loading.loader_records import LoaderRecord, configuration, place_of_function
from flatout.measure.loading.workers import BatchTimes
from flatout.measure.user_code import UserCode

HERE = Path(__file__)
DATA = TensorDataset(torch.arange(20.0))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_a_loader_tells_its_configuration() -> None:
    loader: DataLoader[Any] = DataLoader(
        DATA, batch_size=8, num_workers=2, prefetch_factor=3, persistent_workers=True
    )
    assert configuration(loader) == {
        "dataset": "TensorDataset",
        "num_workers": 2,
        "batch_size": 8,
        "pin_memory": False,
        "persistent_workers": True,
        "prefetch_factor": 3,
        "num_batches": 3,
        "streams": False,
        "takes_many": False,
    }


def test_a_batch_sampler_knows_the_batch_size() -> None:
    sampler = BatchSampler(SequentialSampler(DATA), batch_size=5, drop_last=False)
    assert configuration(DataLoader(DATA, batch_sampler=sampler))["batch_size"] == 5


def test_what_a_loader_cannot_tell_is_unknown() -> None:
    found = configuration(DataLoader(Stream(), batch_size=None))
    assert (found["num_batches"], found["batch_size"], found["prefetch_factor"]) == (None, None, None)
    assert found["streams"]


def collate(samples: list[Any], scale: float = 1.0) -> Any:
    return samples


class Collate:
    def __call__(self, samples: list[Any]) -> Any:
        return samples

    def method(self, samples: list[Any]) -> Any:
        return samples


class Inheriting(Collate):
    pass


@pytest.mark.parametrize(
    ("function", "code"),
    [
        (collate, collate.__code__),
        (functools.partial(collate, scale=2.0), collate.__code__),
        (functools.partial(functools.partial(collate)), collate.__code__),
        (Collate(), Collate.__call__.__code__),
        (Inheriting(), Collate.__call__.__code__),
        (Collate().method, Collate.method.__code__),
        (lambda samples: samples, None),
    ],
)
def test_a_collate_function_has_its_place_however_it_is_given(function: Any, code: Any) -> None:
    place = place_of_function(UserCode(str(HERE.parent)), function)
    assert place is not None
    assert place.file == HERE.name
    assert place.line == (code or function.__code__).co_firstlineno


@pytest.mark.parametrize("function", [torch.utils.data.default_collate, list, None, torch.stack])
def test_code_of_libraries_has_no_place(function: Any) -> None:
    assert place_of_function(UserCode(str(HERE.parent)), function) is None


def record(**changes: Any) -> LoaderRecord:
    made = LoaderRecord(loader=None, place=None, config=configuration(DataLoader(DATA)))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_record_without_batches_knows_no_seconds() -> None:
    found = record().evidence()
    assert (found.wait_s, found.fetch_s, found.collate_s, found.lengths) == (None, None, None, None)
    assert (found.workers, found.epochs, found.trains) == ((), (), False)


def test_batches_of_as_many_rows_may_differ_in_their_shapes() -> None:
    noted = record()
    for rows, length in ((8, 5), (8, 5), (3, 4)):
        noted.note_shapes({"tokens": torch.ones(rows, length), "lengths": [length] * rows}, rows)
        assert not noted.is_ragged  # an epoch's last batch is smaller
    noted.note_shapes({"tokens": torch.ones(8, 6), "lengths": [6] * 8}, 8)
    assert noted.is_ragged


def test_a_batch_is_late_until_its_worker_has_finished_it() -> None:
    noted = record()
    for done_at_s in (9.0, 12.0, 15.0):  # before it was asked for; meanwhile; by another clock
        noted.note_wait(BatchTimes(worker=0, done_at_s=done_at_s), 10.0, 13.0)
    noted.note_wait(BatchTimes(worker=0, done_at_s=12.0, sampled=True), 10.0, 13.0)
    noted.note_wait(BatchTimes(done_at_s=12.0, apart_s=1.0), 10.0, 13.0)  # made in the training process
    assert (noted.waits_s, noted.lates_s) == ([3.0, 3.0, 3.0, 3.0, 2.0], [0.0, 2.0, 3.0])


def test_batches_are_summed_up_by_worker() -> None:
    made = [
        (BatchTimes(worker=1, fetch_s=3.0, collate_s=1.0, cpu_s=2.0, blocked_s=1.0, done_at_s=10.0), 14.0),
        (BatchTimes(worker=0, fetch_s=1.0, collate_s=0.5, cpu_s=1.0, done_at_s=10.0), 11.0),
        (
            BatchTimes(worker=1, fetch_s=5.0, collate_s=2.0, cpu_s=3.0, blocked_s=2.0, done_at_s=20.0),
            19.0,
        ),  # two clocks
    ]
    found = record(
        made=made,
        waits_s=[2.0, 4.0],
        lates_s=[1.0, 2.0],
        lengths=[[1, 4]],
        epochs=[EpochStart(iter_s=1, first_wait_s=2)],
    )
    evidence = found.evidence()
    assert evidence.late_s == 1.5
    assert evidence.workers == (
        Worker(
            worker=0, num_batches=1, fetch_s=1.0, collate_s=0.5, queue_age_s=1.0, cpu_s=1.0, blocked_s=0.0
        ),
        Worker(
            worker=1, num_batches=2, fetch_s=4.0, collate_s=1.5, queue_age_s=2.0, cpu_s=2.5, blocked_s=1.5
        ),
    )
    assert evidence.fetch_s is not None and evidence.fetch_s.num == 3
    assert (
        evidence.wait_s is not None
        and evidence.wait_s.mean_s == 3.0
        and evidence.cpu_s == 2.0
        and evidence.blocked_s == 1.0
    )
    assert evidence.lengths is not None and evidence.lengths.padded_share == pytest.approx(3 / 8)
    assert len(evidence.epochs) == 1
