"""The steps of one job at any size: from a store, replayed from small traces, or traced in a child process.

Three small traces fix a replay in the batch size (see `replay`).  Sizes named as `knobs` are replayed too,
all from one set of small traces: two more for each, and one in which all of them move.  A store keeps traces
between commands: it is asked before a trace is made, and told afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, Protocol, TypedDict

from flatout.ground import OnProgress, ignore
from flatout.ground.errors import BadInput, StructureChanges
from flatout.hardware.device import Device
from flatout.hardware.simulated import simulated_device
from flatout.memory.jobs.job import Job, Recipe, Sizes, check_batch_size, is_count
from flatout.memory.predict.replay import Replay, SizedTrace, fit_replay, with_own_sizes
from flatout.memory.predict.samples import BATCH, sample_sizes
from flatout.memory.process.isolated_process import check_build, run_isolated, run_with_cuda
from flatout.memory.trace.make_trace import (
    NATIVE,
    RULED,
    import_before_forking,
    trace_here,
    trace_natively,
)
from flatout.memory.trace.record import Guess, Lean, Trace

Parallel = Literal["ddp", "fsdp2"]
TraceKey = tuple[Recipe, tuple[tuple[str, int], ...]]
NATIVE_AT_ONCE = 2  # each takes a CUDA context of the GPU
SAMPLES = (8, 16, 24)  # batches: multiples of most numbers of experts, and above special cases such as 1


class TraceStore(Protocol):
    """A store of traces between commands, by the conditions they were made under."""

    def find(self, conditions: object) -> Trace | None: ...

    def keep(self, conditions: object, trace: Trace) -> None: ...


class StepOptions(TypedDict, total=False):
    """Options of `TracedSteps`."""

    device: Device | str | None
    ranks: int
    parallel: Parallel
    native: bool
    knobs: Sequence[str]
    store: TraceStore | None
    on_progress: OnProgress
    on_traces: Callable[[int], None]  # told how many are about to be made


class TracedSteps:
    """The steps of one job on one kind of device.

    With `native`, traces are made on tensors without data of the GPU that is here (`make_trace`).
    """

    def __init__(
        self,
        job: Job,
        *,
        device: Device | str | None = None,
        ranks: int = 1,
        parallel: Parallel = "ddp",
        native: bool = False,
        knobs: Sequence[str] = (BATCH,),
        store: TraceStore | None = None,
        on_progress: OnProgress = ignore,
        on_traces: Callable[[int], None] = lambda num_traces: None,
    ) -> None:
        if not is_count(ranks) or parallel not in ("ddp", "fsdp2"):
            raise BadInput(f"ranks={ranks!r} and parallel={parallel!r}: at least 1 rank, under ddp or fsdp2")
        unknown = [knob for knob in knobs if knob not in job.sizes]
        if unknown:
            raise _unknown_sizes(unknown, job)
        if native:
            check_build(NATIVE)
        self.job = job
        self.native = native
        self.knobs = tuple(dict.fromkeys((BATCH, *knobs)))
        self.ranks, self.parallel = ranks, parallel
        if not isinstance(device, Device | str | None):
            raise BadInput(
                f"device={device!r} is not the name of a GPU", hint='write it as "A100-80GB" or "24GB"'
            )
        self.device = simulated_device(device) if isinstance(device, str) else device
        # A device that is known by its memory alone has no kind to find a native trace by.
        of_no_kind = native and (self.device is None or self.device.compute_capability is None)
        self.store = None if of_no_kind else store
        self.on_progress, self.on_traces = on_progress, on_traces
        self.num_traced = 0  # stored traces that were found are not among them
        self.guesses: frozenset[Guess] = frozenset()  # of all traces that were asked for
        self.leans_on: frozenset[Lean] = frozenset()  # likewise
        self._traces: dict[tuple[TraceKey, bool], Trace] = {}  # True: a quick one
        self._replays: dict[tuple[TraceKey, bool], Replay | None] = {}  # True: in every knob

    def what_if(self, recipe: Recipe, *, sizes: Sizes | None = None) -> SizedTrace:
        """Return the step at `sizes`: replayed if it follows from small traces, else traced."""
        wanted = self._complete(sizes)
        for in_every_knob in (True, False):
            replay = self._replay(recipe, wanted, in_every_knob=in_every_knob)
            if replay is not None and replay.covers(**wanted):
                try:
                    return replay.at(**wanted)
                except StructureChanges:
                    pass
        return with_own_sizes(self.trace(recipe, wanted, quick=True))

    def trace(self, recipe: Recipe, sizes: Sizes, *, quick: bool = False) -> Trace:
        """Return the trace at `sizes`; a `quick` one steps only the last accumulated micro-batch."""
        quick = quick and _accumulates(recipe)
        at = (_key(recipe, sizes), quick)
        if at not in self._traces:
            self._traces[at] = self.make_traces(recipe, [sizes], quick=quick)[0]
        return self._traces[at]

    def _replay(self, recipe: Recipe, sizes: Sizes, *, in_every_knob: bool = False) -> Replay | None:
        """Return a replay in the batch size or in every knob; None if the job has none."""
        if in_every_knob and len(self.knobs) == 1:
            return None
        moved = self.knobs if in_every_knob else (BATCH,)
        at = (_key(recipe, {name: size for name, size in sizes.items() if name not in moved}), in_every_knob)
        if at not in self._replays:
            samples = [{**sizes, BATCH: batch_size} for batch_size in SAMPLES]
            if in_every_knob:
                own = {name: self.job.sizes[name] for name in self.knobs}  # what a model has positions for
                samples = sample_sizes({**sizes, **own}, knobs=self.knobs)
            try:
                traces = self.make_traces(recipe, samples, quick=True)
                self._replays[at] = fit_replay(traces, exact=in_every_knob)
            except StructureChanges:
                self._replays[at] = None
        return self._replays[at]

    def make_traces(self, recipe: Recipe, all_sizes: Iterable[Sizes], *, quick: bool = False) -> list[Trace]:
        """Return a trace at each of `all_sizes`, in their order, from the store if it has them."""
        wanted = [dict(sizes) for sizes in all_sizes]
        conditions = [self._conditions(recipe, sizes, quick=quick) for sizes in wanted]
        found = [self.store.find(condition) if self.store else None for condition in conditions]
        missing = [number for number, trace in enumerate(found) if trace is None]
        if missing:
            self.on_traces(len(missing))
            made = self._make(recipe, [wanted[number] for number in missing], quick=quick)
            self.num_traced += len(made)
            for number, trace in zip(missing, made, strict=True):
                found[number] = trace
                if self.store is not None:
                    self.store.keep(conditions[number], trace)
        traces = [trace for trace in found if trace is not None]
        self.guesses = self.guesses.union(*(trace.guesses for trace in traces))
        self.leans_on = self.leans_on.union(*(trace.leans_on for trace in traces))
        return traces

    def _conditions(self, recipe: Recipe, sizes: Sizes, *, quick: bool) -> dict[str, object]:
        """Return what a trace depends on; of a device, its kind but not its memory."""
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

    def _make(self, recipe: Recipe, all_sizes: Sequence[Sizes], *, quick: bool) -> list[Trace]:
        batches = ", ".join(str(sizes[BATCH]) for sizes in all_sizes)
        self.on_progress(f"tracing {self.job.name}, {_describe(recipe)}, at batch {batches}")
        import_before_forking()
        last = quick and _accumulates(recipe)

        def one(sizes: Sizes) -> Trace:
            make = trace_natively if self.native else trace_here
            work = partial(make, self.job, recipe, sizes, device=self.device, last_micro_batch=last)
            run, what = (run_with_cuda, NATIVE) if self.native else (run_isolated, RULED)
            return self._of_one_rank(run(work, what=what), recipe)

        num_at_once = NATIVE_AT_ONCE if self.native else len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(max_workers=num_at_once) as pool:
            return list(pool.map(one, all_sizes))

    def _of_one_rank(self, trace: Trace, recipe: Recipe) -> Trace:
        if self.ranks == 1 or recipe.mode != "train":
            return trace
        from flatout.memory.predict import parallel
        from flatout.memory.predict.fsdp_units import units_of_job

        if self.parallel == "ddp":
            return parallel.with_ddp(trace)
        units = run_isolated(units_of_job, self.job, recipe, what=RULED)
        return parallel.with_fsdp2(trace, ranks=self.ranks, units=units)

    def _complete(self, sizes: Sizes | None) -> dict[str, int]:
        unknown = sorted(set(sizes or ()) - set(self.job.sizes))
        if unknown:
            raise _unknown_sizes(unknown, self.job)
        complete = {**self.job.sizes, **(sizes or {})}
        check_batch_size(complete[BATCH], of=self.job.name)
        return complete


def _unknown_sizes(names: Sequence[str], job: Job) -> BadInput:
    return BadInput(f"{', '.join(names)} is not a size of {job.name}", hint=f"it has {', '.join(job.sizes)}")


def _accumulates(recipe: Recipe) -> bool:
    return recipe.accumulation > 1 and recipe.mode == "train"


def _key(recipe: Recipe, sizes: Mapping[str, int]) -> TraceKey:
    return recipe, tuple(sorted(sizes.items()))


def _describe(recipe: Recipe) -> str:
    parts: list[str] = [recipe.precision, recipe.mode]
    if recipe.checkpointing:
        parts.append("checkpointing")
    if recipe.accumulation > 1:
        parts.append(f"accumulation {recipe.accumulation}")
    return ", ".join(parts)
