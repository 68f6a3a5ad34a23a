from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils import fetch, worker

from flatout.measure import clock as clocks
from flatout.measure.batches import KeptBatch, arrays_of
from flatout.measure.clock import EXCLUDED, WAIT, Clock
from flatout.measure.evidence import Loader, Place
from flatout.measure.loading import loaders
from flatout.measure.loading.loaders import LoaderWatch, _num_queued
from flatout.measure.loading.workers import LOG
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode
from tests.support.measure import line_of

HERE = Path(__file__)
NUM_BATCHES, BATCH = 10, 4


@pytest.fixture
def patches() -> Iterator[Patches]:
    patches = Patches()
    yield patches
    patches.undo()


@pytest.fixture
def watch(patches: Patches) -> LoaderWatch:
    LOG.reset()
    watch = LoaderWatch(Clock(), UserCode(str(HERE.parent)))
    watch.install(patches)
    return watch


def dataset(num_batches: int = NUM_BATCHES) -> TensorDataset:
    return TensorDataset(torch.arange(float(num_batches * BATCH)))


def make_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=BATCH, **options)  # at: loader


def made_at() -> Place:
    return Place(file=HERE.name, line=line_of(HERE, "loader"), function="make_loader")


def train_on(watch: LoaderWatch, batches: Iterator[Any], num: int) -> list[list[float]]:
    """Take `num` batches, an optimizer step after each; the first row of each tells which it was."""
    seen = []
    for _ in range(num):
        (x,) = next(batches)
        seen.append(x.tolist())
        watch.num_steps += 1
    return seen


def batch(number: int, rows: int = BATCH) -> list[float]:
    return [float(number * BATCH + row) for row in range(rows)]


def only(watch: LoaderWatch) -> Loader:
    (found,) = watch.evidence()
    return found


def test_epochs_waits_and_configuration_are_recorded(watch: LoaderWatch) -> None:
    loader = make_loader(drop_last=True)
    for _ in range(3):
        for (_x,) in loader:
            watch.num_steps += 1
    found = only(watch)
    assert found.place == made_at()
    assert (found.dataset, found.batch_size, found.num_workers) == ("TensorDataset", BATCH, 0)
    assert (found.num_batches, found.prefetch_factor) == (NUM_BATCHES, None)
    assert found.trains
    assert len(found.epochs) == 3
    assert all(epoch.iter_s > 0 and epoch.first_wait_s > 0 for epoch in found.epochs)
    assert [epoch.end_s > 0 for epoch in found.epochs] == [False, True, True]  # of the epoch before
    assert found.wait_s is not None and found.fetch_s is not None
    assert found.wait_s.num == 3 * (NUM_BATCHES - 1)  # the first of an epoch is reported apart
    assert found.fetch_s.num == 3 * NUM_BATCHES


def test_waiting_is_charged_to_the_loader(watch: LoaderWatch) -> None:
    loader = make_loader()
    watch.clock.take()
    list(loader)
    totals = watch.clock.take()
    assert totals[WAIT] > 0
    assert watch.clock.stack == [5]


def test_a_loader_that_no_step_follows_does_not_train(watch: LoaderWatch) -> None:
    list(make_loader())
    assert not only(watch).trains
    assert watch.trained_on() is None


def test_a_loader_whose_batch_is_the_whole_training_set_is_not_what_steps_wait_for(
    watch: LoaderWatch,
) -> None:
    first = iter(make_loader())
    next(first)
    watch.num_steps += loaders.MOST_STEPS_OF_A_BATCH
    assert watch.trained_on() is not None
    watch.num_steps += 1
    assert watch.trained_on() is None and only(watch).trains
    next(first)
    assert watch.trained_on() is not None


def test_a_loader_made_before_the_watch_is_seen_without_its_line(patches: Patches) -> None:
    loader = make_loader()
    watch = LoaderWatch(Clock(), UserCode(str(HERE.parent)))
    watch.install(patches)
    assert len(list(loader)) == NUM_BATCHES
    assert only(watch).place is None


def test_workers_older_than_the_watch_go_on(patches: Patches) -> None:
    """In a notebook the loader was often iterated before it is diagnosed."""
    loader = make_loader(num_workers=1, persistent_workers=True)
    half_used = iter(make_loader())
    next(half_used)
    assert len(list(loader)) == NUM_BATCHES
    watch = LoaderWatch(Clock(), UserCode(str(HERE.parent)))
    watch.install(patches)
    assert len(list(loader)) == NUM_BATCHES
    assert len(list(half_used)) == NUM_BATCHES - 1
    found = only(watch)
    assert found.num_workers == 1
    assert found.workers == ()  # those processes send no figures
    loader._iterator._shutdown_workers()  # type: ignore[union-attr]


def test_workers_that_outlive_the_watch_give_plain_batches(watch: LoaderWatch, patches: Patches) -> None:
    loader = make_loader(num_workers=1, persistent_workers=True)
    running = iter(loader)
    first = next(running)
    patches.undo()
    batches = [first, *running, *loader]
    assert [x.tolist() for (x,) in batches] == [batch(i) for i in range(NUM_BATCHES)] * 2
    del running
    loader._iterator._shutdown_workers()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["plain", "workers"]
)
def test_a_loader_dies_when_the_script_drops_it(watch: LoaderWatch, options: dict[str, Any]) -> None:
    """Its iterator's end is what ends the workers; held in a cycle they would live until a collection."""
    gc.collect()
    gc.disable()
    try:
        loader = make_loader(**options)
        list(loader)
        gone = weakref.ref(loader)
        del loader
        assert gone() is None
    finally:
        gc.enable()


def test_a_dataset_is_not_kept_alive(watch: LoaderWatch) -> None:
    data = dataset()
    gone = weakref.ref(data)
    list(DataLoader(data, batch_size=BATCH))
    del data
    gc.collect()
    assert gone() is None


def test_one_line_that_makes_a_loader_every_epoch_is_one_loader(watch: LoaderWatch) -> None:
    for _ in range(3):
        for (_x,) in make_loader():
            watch.num_steps += 1
    found = only(watch)
    assert len(found.epochs) == 3
    assert found.place == made_at()


def test_one_line_that_makes_a_loader_every_epoch_is_one_loader_though_cycles_hold_it(
    watch: LoaderWatch,
) -> None:
    for _ in range(3):
        loader = make_loader()
        loader.itself = loader
        for (_x,) in loader:
            watch.num_steps += 1
        del loader
    assert len(only(watch).epochs) == 3


def test_two_loaders_of_one_line_at_the_same_time_stay_two(watch: LoaderWatch) -> None:
    pairs = zip(make_loader(), make_loader(), strict=True)
    assert len(list(pairs)) == NUM_BATCHES
    assert [len(found.epochs) for found in watch.evidence()] == [1, 1]


def test_a_collate_function_of_the_user_has_its_place(watch: LoaderWatch) -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples)

    class Collate:
        def __call__(self, samples: list[Any]) -> Any:
            return samples

    loaders = [make_loader(collate_fn=function) for function in (collate, Collate(), None)]
    for loader in loaders:
        list(loader)
    places = [found.collate_place for found in watch.evidence()]
    first = collate.__code__.co_firstlineno
    assert [place.line if place else None for place in places] == [
        first,
        Collate.__call__.__code__.co_firstlineno,
        None,
    ]


# -- batches served again


def serving_after(watch: LoaderWatch, loader: Any, num_real: int, arm: str = "cached") -> Iterator[Any]:
    """An iterator that gave `num_real` real batches and is to give kept ones."""
    watch.keeping = True
    batches = iter(loader)
    assert train_on(watch, batches, num_real) == [batch(i) for i in range(num_real)]
    watch.keeping = watch.recording = False
    watch.begin_serving(arm)
    return batches


def test_kept_batches_are_served_in_order_again_and_again(watch: LoaderWatch) -> None:
    batches = serving_after(watch, make_loader(), 3)
    assert train_on(watch, batches, 5) == [batch(0), batch(1), batch(2), batch(0), batch(1)]


def test_workers_rest_before_batches_are_served(watch: LoaderWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would take cores from the steps that are timed on kept batches."""
    monkeypatch.setattr(loaders, "LONGEST_REST_S", 60.0)
    batches = serving_after(watch, make_loader(num_workers=2), 2)
    num_asked = len(batches._task_info)  # type: ignore[attr-defined]
    assert _num_queued(batches) == num_asked > 0
    assert train_on(watch, batches, 1) == [batch(0)]
    assert _num_queued(batches) == num_asked


def test_the_epoch_keeps_its_length_while_batches_are_served(watch: LoaderWatch) -> None:
    loader = make_loader()
    batches = serving_after(watch, loader, 3)
    assert len(train_on(watch, batches, 4)) == 4
    watch.begin_serving(None)
    # the real loader rested meanwhile and goes on where it was
    assert train_on(watch, batches, 3) == [batch(3), batch(4), batch(5)]
    assert next(batches, None) is None
    assert len(list(loader)) == NUM_BATCHES


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_an_epoch_served_to_its_end_is_followed_by_a_whole_one(
    watch: LoaderWatch, options: dict[str, Any]
) -> None:
    loader = make_loader(**options)
    batches = serving_after(watch, loader, 2)
    assert len(train_on(watch, batches, NUM_BATCHES - 2)) == NUM_BATCHES - 2
    assert next(batches, None) is None
    del batches
    assert len([watch.num_steps for _ in loader]) == NUM_BATCHES
    watch.begin_serving(None)
    assert [x.tolist() for (x,) in loader] == [batch(i) for i in range(NUM_BATCHES)]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_an_epoch_that_is_complete_before_the_first_served_batch_ends(
    watch: LoaderWatch, options: dict[str, Any]
) -> None:
    loader = make_loader(**options)
    batches = serving_after(watch, loader, NUM_BATCHES)
    assert next(batches, None) is None
    assert not watch.fell_back
    del batches
    assert len([watch.num_steps for _ in loader]) == NUM_BATCHES


@pytest.mark.parametrize("arm", ["cached", "half"])
def test_serving_and_keeping_are_not_the_jobs_time(
    watch: LoaderWatch, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    spent_s = 0.0

    def slowly(function: Any) -> Any:
        def slow(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent_s
            spent_s += 30.0
            return function(*args, **kwargs)

        return slow

    monkeypatch.setattr(clocks, "now", lambda: spent_s)
    monkeypatch.setattr(KeptBatch, "serve", slowly(KeptBatch.serve))
    for name in ("num_rows", "num_bytes", "halve"):
        monkeypatch.setattr(loaders, name, slowly(getattr(loaders, name)))
    watch.clock.restart()
    batches = serving_after(watch, make_loader(), 2, arm=arm)
    train_on(watch, batches, 2)
    watch.begin_serving(None)
    train_on(watch, batches, 2)
    totals = watch.clock.take()
    assert totals[EXCLUDED] == spent_s > 0
    assert sum(totals) == spent_s


def test_half_of_a_kept_batch_is_served(watch: LoaderWatch) -> None:
    batches = serving_after(watch, make_loader(), 2, arm="half")
    assert train_on(watch, batches, 3) == [batch(0, rows=2), batch(1, rows=2), batch(0, rows=2)]
    assert watch.rows == 2
    assert not watch.fell_back


def test_what_cannot_be_halved_is_said_and_no_step_of_it_counts(watch: LoaderWatch) -> None:
    loader = DataLoader(dataset(), batch_size=2)
    watch.keeping = True
    batches = iter(loader)
    train_on(watch, batches, 2)
    watch.begin_serving("half")
    assert train_on(watch, batches, 1) == [[4.0, 5.0]]
    assert watch.cannot_halve == "batches of 2 are too small for it"
    assert watch.fell_back


def test_a_script_that_changes_its_batches_gets_copies_as_they_were(watch: LoaderWatch) -> None:
    watch.keeping = True
    batches = iter(make_loader())
    for _ in range(3):
        (x,) = next(batches)
        x.add_(100)
        watch.num_steps += 1
    watch.begin_serving("cached")
    served = train_on(watch, batches, 2)
    assert served in ([batch(1), batch(2)], [batch(2), batch(2)], [batch(2), batch(1)])
    assert not watch.fell_back


def test_only_the_loader_that_is_trained_on_is_served(watch: LoaderWatch) -> None:
    evaluation = make_loader()
    watch.keeping = True
    assert len(list(evaluation)) == NUM_BATCHES
    batches = serving_after(watch, make_loader(), 2)
    assert [x.tolist() for (x,) in evaluation] == [batch(i) for i in range(NUM_BATCHES)]
    assert train_on(watch, batches, 1) == [batch(0)]


def test_what_the_workers_did_meanwhile_is_thrown_away_unseen(watch: LoaderWatch) -> None:
    """Otherwise the real steps that follow would find a full queue that no real step would have found."""
    loader = DataLoader(dataset(40), batch_size=BATCH, num_workers=1, prefetch_factor=4)
    batches = serving_after(watch, loader, 3)
    iterator: Any = batches
    before = _num_queued(iterator)
    train_on(watch, batches, 1)
    record = watch.records[0]
    queued_before = record.queued_before
    assert queued_before is not None and queued_before <= before  # meanwhile the worker has come to rest
    while _num_queued(iterator) < 4:  # the worker fills its queue
        pass
    watch.begin_serving(None)
    watch.clock.take()
    (seen,) = train_on(watch, batches, 1)
    num_discarded = record.stood_in - 1
    assert 4 - queued_before <= num_discarded <= 4
    assert seen == batch(3 + num_discarded)
    assert watch.clock.take()[EXCLUDED] > 0
    iterator._shutdown_workers()


def test_kept_batches_are_let_go_with_the_watch(watch: LoaderWatch, patches: Patches) -> None:
    serving_after(watch, make_loader(), 3)
    assert sum(len(arrays_of(record.kept[0].batch)) for record in watch.records) > 0
    patches.undo()
    assert all(not record.kept for record in watch.records)


# -- what is not a DataLoader, or not on the training thread


def test_any_iterable_is_watched_the_same_way(watch: LoaderWatch) -> None:
    data = [(torch.full((BATCH,), float(i)),) for i in range(4)]
    watch.keeping = True
    for _ in range(2):
        for (_x,) in watch.watch_iterable(data):
            watch.num_steps += 1
    found = only(watch)
    assert (found.dataset, found.num_batches, found.num_workers) == ("list", 4, None)
    assert len(found.epochs) == 2
    assert found.fetch_s is None  # what works behind it is unknown
    watch.begin_serving("cached")
    served = [x[0].item() for (x,) in watch.watch_iterable(data)]
    assert served == [0, 1, 2, 3]


def test_an_iterable_without_a_length_ends_where_it_ends(watch: LoaderWatch) -> None:
    assert list(watch.watch_iterable(iter([1, 2, 3]))) == [1, 2, 3]
    assert only(watch).num_batches is None


def test_other_threads_load_unwatched(watch: LoaderWatch) -> None:
    loader = make_loader()
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(loader))
    thread.start()
    thread.join()
    assert len(got) == NUM_BATCHES
    assert watch.evidence() == ()


def test_everything_of_torch_is_as_it_was_after_the_watch() -> None:
    def patched() -> list[Any]:
        base, multi = torch_loader._BaseDataLoaderIter, torch_loader._MultiProcessingDataLoaderIter
        places: list[tuple[Any, str]] = [
            (DataLoader, "__init__"),
            (DataLoader, "__iter__"),
            (base, "__init__"),
            (base, "__next__"),
            (multi, "_process_data"),
            (fetch._MapDatasetFetcher, "__init__"),
            (fetch._IterableDatasetFetcher, "__init__"),
            (worker, "_worker_loop"),
        ]
        return [vars(owner).get(name) for owner, name in places]  # None: inherited

    before = patched()
    patches = Patches()
    LoaderWatch(Clock(), UserCode(str(HERE.parent))).install(patches)
    assert all(one is not other for one, other in zip(patched(), before, strict=True))
    patches.undo()
    assert all(one is other for one, other in zip(patched(), before, strict=True))
    assert sys.getprofile() is None
