"""The notes on one DataLoader, and the evidence they become."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.measure.batches import KeptBatch, arrays_of
from flatout.measure.evidence import Call, EpochStart, FetchLine, Loader, Place, Worker
from flatout.measure.loading.fetch_stacks import FetchCounts, lines_of
from flatout.measure.loading.lengths import summarise
from flatout.measure.loading.workers import BatchTimes
from flatout.measure.statistics import spread
from flatout.measure.user_code import UserCode

MOST_KEPT = 16
MOST_SHAPES = 64  # batches whose shapes are noted

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class LoaderRecord:
    """Everything noted about one DataLoader."""

    loader: Any  # weak reference
    place: Place | None
    config: dict[str, Any]
    via: str | None = None  # the library line that makes it
    collate_place: Place | None = None
    waits_s: list[float] = field(default_factory=list)
    lates_s: list[float] = field(default_factory=list)  # of these, until a worker had finished the batch
    made: list[tuple[BatchTimes, float]] = field(default_factory=list)  # (figures, arrival)
    epochs: list[EpochStart] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    calls: tuple[Call, ...] = ()
    lines: FetchCounts = field(default_factory=Counter)
    kept: deque[KeptBatch] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))
    kept_bytes: int | None = None  # of the first kept batch
    shapes: dict[int | None, set[Shapes]] = field(default_factory=dict)  # of batches, by their rows
    copies: bool = False  # the script changes its batches in place
    iter_s: float = 0.0
    end_s: float = 0.0  # of the previous epoch
    first: bool = False  # the next batch is the first of its epoch
    given: int = 0  # batches handed out in this epoch
    served: int = 0  # kept batches handed out in this counterfactual block
    queued_before: int | None = None  # finished batches in the queue when serving began
    step_at_last_batch: int | None = None
    trains: bool = False
    stood_in: int = 0  # kept batches served and real ones discarded in this epoch

    @property
    def last_step(self) -> int:
        """The number of optimizer steps before its last batch."""
        return self.step_at_last_batch or 0

    def note_wait(self, times: BatchTimes | None, start: float, end: float) -> None:
        self.waits_s.append(end - start - (times.apart_s if times is not None else 0.0))
        if times is not None and times.worker is not None and not times.sampled:
            self.lates_s.append(min(max(0.0, times.done_at_s - start), end - start))

    def note_lines(self, lines: tuple[FetchLine, ...]) -> None:
        for line in lines:
            self.lines[line.place, line.in_collate, line.library] += line.samples

    def note_shapes(self, batch: Any, rows: int | None) -> None:
        if sum(map(len, self.shapes.values())) < MOST_SHAPES and not self.is_ragged:
            shapes = tuple(tuple(array.shape) for array in arrays_of(batch))
            self.shapes.setdefault(rows, set()).add(shapes)

    @property
    def is_ragged(self) -> bool:
        """Whether batches of as many rows differ in their shapes: padded to their own longest row, say."""
        return any(len(shapes) > 1 for shapes in self.shapes.values())

    @property
    def num_looks(self) -> int:
        return sum(self.lines.values())

    def evidence(self) -> Loader:
        by_worker: dict[int, list[tuple[BatchTimes, float]]] = {}
        for times, arrival in self.made:
            if times.worker is not None:
                by_worker.setdefault(times.worker, []).append((times, arrival))
        return Loader(
            place=self.place,
            via=self.via,
            trains=self.trains,
            wait_s=spread(self.waits_s),
            late_s=mean(self.lates_s),
            fetch_s=spread([times.fetch_s for times, _ in self.made]),
            collate_s=spread([times.collate_s for times, _ in self.made]),
            cpu_s=mean([times.cpu_s for times, _ in self.made]),
            blocked_s=mean([times.blocked_s for times, _ in self.made]),
            epochs=tuple(self.epochs),
            workers=tuple(_worker_evidence(worker, made) for worker, made in sorted(by_worker.items())),
            collate_place=self.collate_place,
            lengths=summarise(self.lengths),
            calls=self.calls,
            lines=lines_of(self.lines),
            **self.config,
        )


def configuration(loader: Any) -> dict[str, Any]:
    """Return the fields of `Loader` that a DataLoader itself provides."""
    from torch.utils.data import IterableDataset, Subset

    try:
        num_batches: int | None = len(loader)
    except TypeError:
        num_batches = None
    batch_size = loader.batch_size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return {
        "dataset": type(loader.dataset).__name__,
        "num_workers": int(loader.num_workers),
        "batch_size": batch_size if isinstance(batch_size, int) else None,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "prefetch_factor": loader.prefetch_factor,
        "num_batches": num_batches,
        "streams": isinstance(loader.dataset, IterableDataset),
        "takes_many": hasattr(loader.dataset, "__getitems__") and not isinstance(loader.dataset, Subset),
    }


def place_of_function(user_code: UserCode, function: Any) -> Place | None:
    """Return where the user defines a function, a method, a partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return user_code.place_in(code) if code is not None and user_code.is_user(code) else None


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _worker_evidence(worker: int, made: list[tuple[BatchTimes, float]]) -> Worker:
    num = len(made)
    return Worker(
        worker=worker,
        num_batches=num,
        fetch_s=sum(times.fetch_s for times, _ in made) / num,
        collate_s=sum(times.collate_s for times, _ in made) / num,
        queue_age_s=sum(max(0.0, arrival - times.done_at_s) for times, arrival in made) / num,
        cpu_s=sum(times.cpu_s for times, _ in made) / num,
        blocked_s=sum(times.blocked_s for times, _ in made) / num,
    )
