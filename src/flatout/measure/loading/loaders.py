"""DataLoaders as the training process sees them: waits, epochs, and batches served again.

Iteration is observed at `_BaseDataLoaderIter.__next__`, below every wrapper (generators, Accelerate,
Lightning, the Hugging Face Trainer), so no script has to change.  A counterfactual block serves the batches
of the previous real block again, in the same order, while the real loader rests.  Its workers keep filling
their queue meanwhile; the surplus is thrown away unseen before real batches resume, or the following real
steps would look faster than they are.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import sys
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from flatout.measure.batches import LEAST_HALVED, KeptBatch, arrays_of, halve, num_bytes, num_rows
from flatout.measure.clock import EXCLUDED, WAIT, Clock, ident, now
from flatout.measure.evidence import EpochStart, Loader, Place
from flatout.measure.loading.fetch_stacks import ENOUGH_LOOKS
from flatout.measure.loading.loader_records import MOST_KEPT, LoaderRecord, configuration, place_of_function
from flatout.measure.loading.workers import LOG, BatchTimes, WorkerLoop, patch_fetchers, real_loop, unwrap
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_KEPT_BYTES = 2 << 30
BRIEFLY_S = 0.02
LONGEST_REST_S, LOOK_AGAIN_S = 0.3, 0.002
MOST_STEPS_OF_A_BATCH = 32  # that train on it again and again

END = object()


class LoaderWatch:
    """Observes every DataLoader of the process."""

    def __init__(self, clock: Clock, user_code: UserCode) -> None:
        self.clock, self.user_code = clock, user_code
        self.pid = os.getpid()
        self.records: list[LoaderRecord] = []
        self._by_loader: weakref.WeakKeyDictionary[Any, LoaderRecord] = weakref.WeakKeyDictionary()
        # by dataset: a loader that a framework rebuilds keeps the user's line
        self._places: dict[int, tuple[weakref.ref[Any], Place, str | None]] = {}
        self.iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._worker_loop = WorkerLoop(user_code.folder)
        self._latest: LoaderRecord | None = None  # the one asked for a batch last
        self._plain: LoaderRecord | None = None  # the iterable passed to a library diagnosis
        self.serving: str | None = None  # None, "cached" or "half"
        self.stand_in: Callable[[], Any] | None = None  # gives batches in place of the kept ones
        self._unwatched = False
        self.keeping = False
        self.recording = True
        self.counts_rows = True  # in every timed step on real batches; removing a statement changes the waits
        self.num_steps = 0  # optimizer steps so far, told by the observer
        self.num_batches = 0
        self.num_served = 0  # of them, in this block of an arm, batches that stand in for real ones
        self.rows: int | None = None
        self.epoch_began = self.training_epoch_began = False
        self.fell_back = False  # a real batch had to be served in place of a kept one
        self.cannot_halve: str | None = None  # why
        self.mutated = False

    # -- installation

    @property
    def unwatched(self) -> bool:
        """Whether loaders made and iterated meanwhile are ours; then their workers are only timed."""
        return self._unwatched

    @unwatched.setter
    def unwatched(self, unwatched: bool) -> None:
        self._unwatched, self._worker_loop.looks = unwatched, not unwatched

    def install(self, patches: Patches) -> None:
        from torch.utils.data import dataloader
        from torch.utils.data._utils import worker

        LOG.clock = self.clock
        real_loop()
        patch_fetchers(patches)
        patches.replace(worker, "_worker_loop", self._worker_loop)
        base: Any = dataloader._BaseDataLoaderIter
        multi: Any = dataloader._MultiProcessingDataLoaderIter
        loader_type = dataloader.DataLoader
        loader_init, loader_iter = loader_type.__init__, loader_type.__iter__
        iterator_init, next_batch, process = base.__init__, base.__next__, multi._process_data
        watch = self

        def init_loader(loader: Any, *args: Any, **kwargs: Any) -> None:
            loader_init(loader, *args, **kwargs)
            if watch.unwatched:
                return
            watch._note_loader(loader, *watch.user_code.place(sys._getframe(1)))

        def iterate(loader: Any) -> Any:
            if watch.unwatched or not watch.is_training_thread():
                return loader_iter(loader)
            record = watch._record(loader)
            region = EXCLUDED if watch.serving and record.trains else WAIT
            watch.clock.enter(region)
            start = now()
            try:
                iterator: Any = loader_iter(loader)
                iterator._flatout_record = record  # with persistent workers it may be older than the watch
                if not loader.persistent_workers:  # otherwise the loader holds the iterator
                    iterator._flatout_loader = loader
                return iterator
            finally:
                watch._begin_epoch(record, now() - start)
                watch.training_epoch_began |= record.trains
                # starting workers disturbs the step, though it is not part of it
                watch.fell_back |= region == EXCLUDED and record.config["num_workers"] > 0
                watch.clock.leave()

        def init_iterator(iterator: Any, loader: Any) -> None:
            iterator_init(iterator, loader)
            if watch.unwatched:
                return
            iterator._flatout_record = watch._record(loader)
            watch.iterators.add(iterator)

        def next_timed(iterator: Any) -> Any:
            if not watch.is_training_thread() or not hasattr(iterator, "_flatout_record"):
                return next_batch(iterator)
            watch.clock.enter(WAIT)
            try:
                return watch._next(iterator, next_batch)
            finally:
                watch.clock.leave()

        def process_data(iterator: Any, data: Any, worker_id: Any) -> Any:
            batch, times = unwrap(data)
            if times is not None:
                iterator._flatout_times = times
            return process(iterator, batch, worker_id)

        patches.replace(loader_type, "__init__", init_loader)
        patches.replace(loader_type, "__iter__", iterate)
        patches.replace(base, "__init__", init_iterator)
        patches.replace(base, "__next__", next_timed)
        patches.replace(multi, "_process_data", process_data)
        patches.on_undo(lambda: self._let_go(process_data))

    def _let_go(self, process_data: Callable[[Any, Any, Any], Any]) -> None:
        """Release all batches; workers that outlive the watch keep sending figures, which are stripped."""
        for record in self.records:
            record.kept.clear()
        for iterator in self.iterators:
            if getattr(iterator, "_workers", None):
                # a proxy: the iterator's end is what ends its workers
                iterator._process_data = functools.partial(process_data, weakref.proxy(iterator))

    def is_training_thread(self) -> bool:
        return ident() == self.clock.owner and os.getpid() == self.pid

    def watch_if_it_makes_batches(self, iterable: Any) -> Iterator[Any]:
        """Iterate what a training loop iterates, watched unless a DataLoader is behind it."""
        iterator, num_before = iter(iterable), self.num_batches
        first = next(iterator, END)
        if first is END:
            return
        if self.num_batches != num_before or not arrays_of(first) or not self.is_training_thread():
            yield first
            yield from iterator
            return
        record = self._plain_record(iterable)
        record.place, _ = self.user_code.place(sys._getframe(1))
        yield from self.watch_iterable(iterable, itertools.chain((first,), iterator))

    def watch_iterable(self, iterable: Any, begun: Iterator[Any] | None = None) -> Iterator[Any]:
        """Iterate something that is not a DataLoader under the same watch."""
        self.clock.enter(WAIT)
        start = now()
        record = self._plain_record(iterable)
        iterator = _PlainIterator(iter(iterable) if begun is None else begun, record)
        self._begin_epoch(record, now() - start)
        self.training_epoch_began = True
        self.clock.leave()
        while True:
            self.clock.enter(WAIT)
            try:
                batch = self._next(iterator, _PlainIterator.__next__)
            except StopIteration:
                return
            finally:
                self.clock.leave()
            yield batch

    def _begin_epoch(self, record: LoaderRecord, iter_s: float) -> None:
        record.iter_s, record.first = iter_s, True
        record.given, record.stood_in, record.queued_before = 0, 0, None
        self.epoch_began = True

    def forget_step(self) -> None:
        """Reset the notes on the current step."""
        self.epoch_began = self.training_epoch_began = self.fell_back = False

    # -- one batch

    def _next(self, iterator: Any, next_batch: Callable[[Any], Any]) -> Any:
        record: LoaderRecord = iterator._flatout_record
        self._note_steps(None if record.first else record)
        record.step_at_last_batch, self._latest = self.num_steps, record
        length = record.config["num_batches"]
        complete = length is not None and record.given >= length
        if complete and record.stood_in:
            # kept batches replaced real ones in this epoch: end it where it would have ended
            start = now()
            if getattr(iterator, "_workers", None) and not iterator._persistent_workers:
                iterator._shutdown_workers()
            record.end_s = now() - start
            raise StopIteration
        # a complete epoch ends by itself: one more batch would shift the next epoch
        if self.serving is not None and record.trains and not complete:
            batch = self._serve(iterator, record)
            if batch is not None:
                record.given += 1
                self.num_batches += 1
                self.num_served += 1
                return batch
            self.fell_back = True
        if record.queued_before is not None:
            self._discard_ahead(iterator, record, next_batch)
        start = now()
        try:
            batch = next_batch(iterator)
        except StopIteration:
            record.end_s = now() - start
            raise
        self._note_batch(iterator, record, batch, start)
        return batch

    def _note_steps(self, *records: LoaderRecord | None) -> None:
        """Mark a loader as training if steps follow its batches, in its epoch or before another batch.

        Steps between two epochs prove nothing: between two evaluations lies the training.
        """
        for record in (self._latest, *records):
            if record is not None and self.num_steps > record.last_step:
                record.trains = True

    def _note_batch(self, iterator: Any, record: LoaderRecord, batch: Any, start: float) -> None:
        end = now()
        record.given += 1
        self.num_batches += 1
        times: BatchTimes | None = getattr(iterator, "_flatout_times", None)
        if times is None and iterator._num_workers == 0:
            times = LOG.take()
        iterator._flatout_times = None
        if record.first:
            record.first = False
            begun = EpochStart(iter_s=record.iter_s, first_wait_s=end - start, end_s=record.end_s)
            record.epochs.append(begun)
            record.end_s = 0.0
        elif self.recording:
            record.note_wait(times, start, end)
        if times is not None:
            if times.sampled:
                record.note_lines(times.lines)
                if record.trains and record.num_looks >= ENOUGH_LOOKS:
                    self._worker_loop.samples = False
            elif self.recording:
                record.made.append((times, end))
            if times.lengths is not None:
                record.lengths.append(times.lengths)
            if times.calls:
                record.calls = times.calls
        if self.keeping:
            with self.clock.excluded():
                self._keep(record, batch)
        elif self.counts_rows:
            with self.clock.excluded():
                self.rows = num_rows(batch, record.config["batch_size"])
                record.note_shapes(batch, self.rows)

    def _keep(self, record: LoaderRecord, batch: Any) -> None:
        rows = self.rows = num_rows(batch, record.config["batch_size"])
        record.note_shapes(batch, rows)
        if record.kept_bytes is None:
            record.kept_bytes = max(1, num_bytes(batch))
            most = max(2, min(MOST_KEPT, MOST_KEPT_BYTES // record.kept_bytes))
            record.kept = deque(maxlen=most)
        if record.kept and record.kept[-1].changed:
            record.copies = True
            record.kept.clear()
        record.kept.append(KeptBatch(batch, rows=rows, copies=record.copies))

    # -- counterfactual batches

    def _serve(self, iterator: Any, record: LoaderRecord) -> Any | None:
        if record.queued_before is None:
            record.queued_before = _num_queued(iterator)
        if self.stand_in is not None:
            record.stood_in += 1
            return self.stand_in()
        with self.clock.excluded():
            return self._serve_kept(record)

    def _serve_kept(self, record: LoaderRecord) -> Any | None:
        while record.kept and record.kept[record.served % len(record.kept)].changed:
            record.copies = True
            del record.kept[record.served % len(record.kept)]
        if not record.kept:
            self.mutated = True
            return None
        kept = record.kept[record.served % len(record.kept)]
        batch, self.rows = kept.serve(), kept.rows
        record.served += self.serving != "one"
        record.stood_in += 1
        if self.serving == "half":
            rows = num_rows(batch, record.config["batch_size"])
            batch = halve(batch, record.config["batch_size"])
            if batch is None:
                self.cannot_halve = (
                    "no common first dimension was found in the batches"
                    if rows is None or rows >= LEAST_HALVED
                    else f"batches of {rows} are too small for it"
                )
            else:
                self.rows = num_rows(batch)
        return batch

    def _discard_ahead(self, iterator: Any, record: LoaderRecord, next_batch: Callable[[Any], Any]) -> None:
        before, record.queued_before = record.queued_before or 0, None
        try:
            with self.clock.excluded():
                # at most as many as were requested by then: a fast worker refills the queue meanwhile
                for _ in range(len(getattr(iterator, "_task_info", ()))):
                    if _num_queued(iterator) <= before:
                        break
                    next_batch(iterator)
                    record.stood_in += 1
        except StopIteration:
            record.given = record.config["num_batches"] or record.given
            raise

    def begin_serving(self, arm: str | None) -> None:
        """Serve kept batches from here on (arm "cached", "half" or "one"), or real ones (None).

        Workers first finish the batches they were asked for, or they take cores from steps without loading.
        """
        self.serving, self.num_served = arm, 0
        if arm is not None:
            self._let_workers_rest()
        for record in self.records:
            record.served = 0

    def _let_workers_rest(self) -> None:
        """Wait, but not long, until the workers have made every batch they were asked for."""
        working = [each for each in self.iterators if getattr(each, "_workers", None)]
        for iterator in working:
            record: LoaderRecord = iterator._flatout_record
            if record.queued_before is None and record.trains:
                record.queued_before = _num_queued(iterator)
        until_s = now() + LONGEST_REST_S
        while any(_num_queued(each) < len(each._task_info) for each in working) and now() < until_s:
            time.sleep(LOOK_AGAIN_S)

    def trained_on(self) -> LoaderRecord | None:
        """Return the loader whose batches the steps of now train on.

        A loader that gave one batch before all of the training is none: serving it again changes no step.
        """
        self._note_steps()
        since = self.num_steps - MOST_STEPS_OF_A_BATCH
        fresh = (record for record in self.records if record.trains and record.last_step >= since)
        return next(fresh, None)

    def training_loader(self) -> Any | None:
        """Return the training loader; None if it is gone or is not a DataLoader."""
        record = self.trained_on()
        return record.loader() if record is not None and record.loader is not None else None

    # -- records

    def note_made(self, loader: Any, place: Place | None) -> None:
        """Note a loader, or any iterable, that is older than the watch; skip it if it is already known."""
        from torch.utils.data import DataLoader

        if not isinstance(loader, DataLoader):
            self._plain_record(loader).place = place
        elif loader not in self._by_loader:
            self._note_loader(loader, place, None)

    def _note_loader(self, loader: Any, place: Place | None, via: str | None) -> None:
        dataset = getattr(loader, "dataset", None)
        known = self._places.get(id(dataset))
        if known is not None and known[0]() is dataset and via is not None:
            _, place, via = known
        elif place is not None:
            with contextlib.suppress(TypeError):  # a list cannot be weakly referenced
                self._places[id(dataset)] = (weakref.ref(dataset), place, via)
        record = LoaderRecord(loader=weakref.ref(loader), place=place, config={}, via=via)
        self._by_loader[loader] = record

    def _plain_record(self, iterable: Any) -> LoaderRecord:
        if self._plain is None:
            config = {
                "dataset": type(iterable).__name__, "num_workers": None, "batch_size": None,
                "pin_memory": False, "persistent_workers": False, "prefetch_factor": None,
                "num_batches": len(iterable) if hasattr(iterable, "__len__") else None,
            }  # fmt: skip
            self._plain = LoaderRecord(loader=None, place=None, config=config)
            self.records.append(self._plain)
        return self._plain

    def _record(self, loader: Any) -> LoaderRecord:
        record = self._by_loader.get(loader)
        if record is None:
            record = LoaderRecord(loader=weakref.ref(loader), place=None, config={})
            self._by_loader[loader] = record
        if not record.config:
            record.config = configuration(loader)
            before = self._made_again(record)
            if before is not None:
                before.loader = record.loader
                self._by_loader[loader] = before
                return before
            record.collate_place = place_of_function(self.user_code, getattr(loader, "collate_fn", None))
            self.records.append(record)
        return record

    def _made_again(self, record: LoaderRecord) -> LoaderRecord | None:
        """Return the record of a loader that one line rebuilds, every epoch for instance."""
        alike = [
            known
            for known in self.records
            if known.place is not None and known.place == record.place and known.config == record.config
        ]
        # the previous loader may live a moment longer, held by a stack sample or a reference cycle
        for wait in (None, functools.partial(time.sleep, BRIEFLY_S), gc.collect) if alike else ():
            if wait is not None:
                with self.clock.excluded() if self.is_training_thread() else contextlib.nullcontext():
                    wait()
            in_use = [getattr(iterator, "_flatout_record", None) for iterator in self.iterators]
            for known in alike:
                is_gone = known.loader is not None and known.loader() is None
                if is_gone and all(each is not known for each in in_use):
                    return known
        return None

    def evidence(self) -> tuple[Loader, ...]:
        self._note_steps()
        return tuple(record.evidence() for record in self.records if record.epochs)


class _PlainIterator:
    """An ordinary iterator with the interface that `LoaderWatch._next` expects."""

    _flatout_times = None
    _num_workers = None

    def __init__(self, iterator: Iterator[Any], record: LoaderRecord) -> None:
        self._iterator, self._flatout_record = iterator, record

    def __next__(self) -> Any:
        return next(self._iterator)


def _num_queued(iterator: Any) -> int:
    """Return the number of finished batches in the loader's queues."""
    queue = getattr(iterator, "_data_queue", None)
    if queue is None:
        return 0
    try:
        queued = int(queue.qsize())
    except NotImplementedError:
        return 0  # macOS cannot count the items in a pipe
    return queued + sum(len(info) == 2 for info in iterator._task_info.values())
