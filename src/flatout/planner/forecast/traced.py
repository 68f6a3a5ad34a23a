"""The forecast of a plan from traces: the memory room behind the planner's questions.

A question costs what it has to trace.  One peak is one trace at its very sizes.  A largest batch is three
small traces, a search in what follows from them, and one trace that verifies each answer; after that, every
other batch of the same job follows for nothing.  Traces may be stored, so that the next command starts with
them.

With `profile` the job is also run for real, at two small batches, for each recipe that is asked for: what the
traces missed there corrects the answers, and the seconds of a micro-batch are measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from flatout.errors import BadInput
from flatout.hardware.device import Device
from flatout.memory.jobs.job import Job, Recipe, Sizes, adamw, optimizer_named
from flatout.memory.predict.forecast import KEPT_FREE, Forecaster
from flatout.memory.predict.repeat_steps import repeated
from flatout.memory.predict.replay import SizedTrace, sized
from flatout.planner.fit.progress import silent
from flatout.planner.forecast.caveats import doubts_of
from flatout.planner.forecast.questions import LargestBatch, Peak, traced

if TYPE_CHECKING:
    from flatout.memory.probe.probe_results import Receipt
    from flatout.memory.trace.record import Guess, Trace
    from flatout.planner.forecast.trace_cache import TraceStore

BATCH = "batch_size"
MOST_MADE = 8192  # rows: a larger batch, which the batch maker would fill, follows from small ones
Key = tuple[Recipe, tuple[tuple[str, int], ...]]


class StoredForecaster(Forecaster):
    """A forecaster that looks for a stored trace before it makes one."""

    store: TraceStore | None = None
    num_traced = 0
    guesses: frozenset[Guess] = frozenset()  # of all traces that were asked for
    on_traces: Callable[[int], None] | None = None  # called with how many are about to be made

    def make_traces(self, recipe: Recipe, all_sizes: Iterable[Sizes], *, quick: bool = False) -> list[Trace]:
        wanted = [dict(sizes) for sizes in all_sizes]
        conditions = [self._conditions(recipe, sizes, quick=quick) for sizes in wanted]
        found = [self.store.find(condition) if self.store else None for condition in conditions]
        missing = [number for number, trace in enumerate(found) if trace is None]
        if missing:
            if self.on_traces is not None:
                self.on_traces(len(missing))
            made = super().make_traces(recipe, [wanted[number] for number in missing], quick=quick)
            self.num_traced += len(made)
            for number, trace in zip(missing, made, strict=True):
                found[number] = trace
                if self.store is not None:
                    self.store.keep(conditions[number], trace)
        traces = [trace for trace in found if trace is not None]
        self.guesses = self.guesses.union(*(trace.guesses for trace in traces))
        return traces

    def _conditions(self, recipe: Recipe, sizes: Sizes, *, quick: bool) -> dict[str, object]:
        """What a trace is made under: of a device its kind, since its memory has no part in a trace."""
        kind = (self.device.compute_capability, self.device.datasheet) if self.device else None
        return {
            "recipe": recipe,
            "sizes": dict(sorted(sizes.items())),
            "quick": quick,
            "device": kind,
            "ranks": self.ranks,
            "parallel": self.parallel,
            "native": self.native,
        }


class TracedForecast:
    """Answers for one job on one device; what was traced once is replayed afterwards."""

    def __init__(
        self,
        job: Job,
        *,
        device: Device,
        ranks: int = 1,
        profile: bool = False,
        expandable_segments: bool = False,
        native: bool = False,
        store: TraceStore | None = None,
        on_progress: Callable[[str], None] = silent,
        on_traces: Callable[[int], None] | None = None,
    ) -> None:
        self._forecaster = StoredForecaster(
            job,
            device=device,
            ranks=ranks,
            expandable_segments=expandable_segments,
            native=native,
            on_progress=on_progress,
        )
        self._forecaster.on_traces = on_traces
        # a device of so much memory is of no kind that a native trace could be found again by
        self._forecaster.store = None if native and device.compute_capability is None else store
        self._others: dict[str, TracedForecast] = {}
        self._profile = profile
        self._on_progress = on_progress
        self._receipts: dict[Key, Receipt] = {}
        self._largest: dict[tuple[Key, int], LargestBatch] = {}
        self._peaks: dict[tuple[Key, int], Peak] = {}
        self._searched_for: set[Key] = set()  # a replay is at hand
        self._verified: set[tuple[Key, int]] = set()  # (what, batch): a trace of these very sizes is at hand

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._forecaster.job.sizes

    def of_stage(self, name: str) -> TracedForecast:
        return self._others.get(name, self)

    def set_stage(self, name: str, other: TracedForecast) -> None:
        """A stage that trains a model of its own."""
        self._others[name] = other

    @property
    def num_traced(self) -> int:
        """Traces made so far; stored ones that were found are not among them."""
        return self._forecaster.num_traced

    def peak_bytes(self, sizes: Mapping[str, int], *, recipe: Recipe) -> Peak:
        recipe = traced(recipe)
        at = (_key(recipe, sizes), sizes[BATCH])
        if at not in self._peaks:
            self._peaks[at] = self._asked_peak(sizes, recipe)
        return self._peaks[at]

    @property
    def doubts(self) -> tuple[str, ...]:
        device = None if self._profile else self._forecaster.device
        return doubts_of(self._forecaster.guesses, device=device)

    def _asked_peak(self, sizes: Mapping[str, int], recipe: Recipe) -> Peak:
        if self._profile:
            return self._corrected(sizes, recipe=recipe)
        if self._is_replayed(sizes, recipe):
            done = self._forecaster.simulate(self._step(sizes, recipe))
            return self._peak(done.peak_allocated_bytes, done.peak_reserved_bytes, recipe, sizes)
        estimate = self._forecaster.estimate(recipe, sizes=sizes)
        return self._peak(estimate.peak_allocated_bytes, estimate.peak_reserved_bytes, recipe, sizes)

    def trains(self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int) -> bool:
        recipe = traced(recipe)
        cap_bytes = capacity_bytes - self._beside_bytes(sizes, recipe)
        if cap_bytes <= 0:
            return False
        expandable = self._forecaster.expandable_segments
        flushes = repeated(self._step(sizes, recipe)).flushes(
            cap_bytes=int(cap_bytes * (1 - KEPT_FREE)), expandable_segments=expandable
        )
        return flushes is not None and not (flushes and expandable)

    def _step(self, sizes: Mapping[str, int], recipe: Recipe) -> SizedTrace:
        if self._is_replayed(sizes, recipe):
            return self._forecaster.what_if(recipe, sizes=sizes)
        return sized(self._forecaster.trace(recipe, {**self.sizes, **sizes}))

    def _is_replayed(self, sizes: Mapping[str, int], recipe: Recipe) -> bool:
        """Where a replay is at hand, or a batch too large to be made; else these very sizes are traced."""
        what = _key(recipe, sizes)
        if (what, sizes[BATCH]) in self._verified:
            return False
        return what in self._searched_for or sizes[BATCH] > MOST_MADE

    def largest_batch(self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int) -> LargestBatch:
        what = _key(traced(recipe), sizes)
        if (what, capacity_bytes) not in self._largest:
            found = self._searched(traced(recipe), sizes, capacity_bytes)
            self._largest[what, capacity_bytes] = found
            self._searched_for.add(what)
            self._verified |= {(what, batch) for batch in (found.safe, found.tight) if batch is not None}
        return self._largest[what, capacity_bytes]

    def step_s(self, sizes: Mapping[str, int], *, recipe: Recipe) -> float | None:
        """Seconds of a micro-batch, carried on from the larger probe in proportion to the batch."""
        if not self._profile:
            return None
        largest = max(self._receipt(traced(recipe), sizes).probes, key=lambda probe: probe.batch_size)
        if largest.micro_batch_s is None:
            return None
        return largest.micro_batch_s * sizes[BATCH] / largest.batch_size

    def _searched(self, recipe: Recipe, sizes: Mapping[str, int], capacity_bytes: int) -> LargestBatch:
        others = {name: size for name, size in sizes.items() if name != BATCH}
        cap_bytes = capacity_bytes - self._context_bytes(recipe, sizes)
        if cap_bytes <= 0:
            return LargestBatch(safe=None, tight=None)
        found = self._forecaster.largest_batch(recipe, cap_bytes=cap_bytes, sizes=others)
        if self._profile and found.tight:
            # What the traces miss at a real step is taken from the cap, and the search made again below it.
            beside = self._beside_bytes({**others, BATCH: found.tight}, recipe)
            cap_bytes = max(1, capacity_bytes - beside)
            found = self._forecaster.largest_batch(recipe, cap_bytes=cap_bytes, sizes=others)
        return LargestBatch(safe=found.safe or None, tight=found.tight or None)

    def _beside_bytes(self, sizes: Mapping[str, int], recipe: Recipe) -> int:
        """What a process takes beside what was traced: the context, and what a real run had in excess."""
        context = self._context_bytes(recipe, sizes)
        if not self._profile:
            return context
        plain = self._forecaster.estimate(recipe, sizes=sizes).peak_reserved_bytes
        return context + max(0, self._corrected(sizes, recipe=recipe).reserved_bytes - plain)

    def _corrected(self, sizes: Mapping[str, int], *, recipe: Recipe) -> Peak:
        from flatout.memory.probe.probe_results import correct

        receipt = self._receipt(recipe, sizes)
        estimate = self._forecaster.estimate(recipe, sizes=sizes)
        at_probes = [
            self._forecaster.estimate(recipe, sizes={**sizes, BATCH: probe.batch_size})
            for probe in receipt.probes
        ]
        found = correct(estimate, receipt, at_probes=at_probes)
        return self._peak(found.peak_allocated_bytes, found.peak_reserved_bytes, recipe, sizes)

    def _peak(self, allocated: int, reserved: int, recipe: Recipe, sizes: Mapping[str, int]) -> Peak:
        process = reserved + self._context_bytes(recipe, sizes)
        return Peak(allocated_bytes=allocated, reserved_bytes=reserved, process_bytes=process)

    def _context_bytes(self, recipe: Recipe, sizes: Mapping[str, int]) -> int:
        measured = self._receipt(recipe, sizes).context_bytes if self._profile else None
        return self._forecaster.context.value if measured is None else measured

    def _receipt(self, recipe: Recipe, sizes: Mapping[str, int]) -> Receipt:
        from flatout.memory.probe.run_probe import probe

        key = _key(recipe, sizes)
        if key not in self._receipts:
            self._on_progress(f"running {self._forecaster.job.name} for a few steps")
            complete = {**self._forecaster.job.sizes, **sizes}
            self._receipts[key] = probe(self._forecaster.job, recipe, sizes=complete)
        return self._receipts[key]


def _key(recipe: Recipe, sizes: Mapping[str, int]) -> Key:
    return recipe, tuple(sorted((name, size) for name, size in sizes.items() if name != BATCH))


def with_optimizer(job: Job, name: str | None, *, on_progress: Callable[[str], None]) -> Job:
    """The job with the optimizer that its config names, where the job leaves it open."""
    if name is None or job.make_optimizer is not adamw:
        return job
    make = optimizer_named(name)
    if make is None:
        on_progress(f"the optimizer {name!r} is not known; planned as AdamW, which keeps two values each")
        return job
    return dataclasses.replace(job, make_optimizer=make)


def nested(values: Mapping[str, object]) -> dict[str, object]:
    """Values by dotted key as what they stand for: {"a.b": 1, "c.0": 2} is {"a": {"b": 1}, "c": [2]}."""
    result: dict[str, object] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        place = result
        for name in path:
            inner = place.setdefault(name, {})
            if not isinstance(inner, dict):
                raise BadInput(f"{key} lies below {name}, which has a value of its own")
            place = inner
        place[last] = value
    return {key: _with_lists(value) for key, value in result.items()}


def _with_lists(value: object) -> object:
    """Keys that count from 0 are the places of a list."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    if [*inner] == [str(number) for number in range(len(inner))]:
        return [*inner.values()]
    return inner
