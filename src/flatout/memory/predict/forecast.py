"""The memory of a job on a device, asked in the terms of people: how much, and how large a batch.

A `Forecaster` traces its job at three small batches in a child process, replays any other size from them,
and simulates PyTorch's allocator on the result.  An answer that matters is traced afresh at its own sizes:
where the step allocates otherwise there than at small sizes, the fresh trace is what counts.

Sizes named as `knobs` beside the batch (a length, a number of negatives) are replayed too, all from one set
of small traces: two more for each, and one in which all of them move.  Where lengths vary, the longest batch
decides: give a histogram of them as `lengths`, length -> how often.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from flatout.decisions import Decision
from flatout.errors import BadInput, StructureChanges
from flatout.hardware.device import Device
from flatout.hardware.simulated import simulated_device
from flatout.memory.cuda.target import workspaces_for
from flatout.memory.jobs.job import Job, Recipe, Sizes
from flatout.memory.predict.allocator import Simulation, simulate
from flatout.memory.predict.estimate import MemoryEstimate, estimate
from flatout.memory.predict.largest_batch import LOOKED_BELOW, MAX_BATCH, longest, unbroken_batch
from flatout.memory.predict.largest_batch import largest_batch as search
from flatout.memory.predict.repeat_steps import repeated
from flatout.memory.predict.replay import Replay, SizedTrace, fit_replay, sized
from flatout.memory.predict.samples import BATCH, sample_sizes
from flatout.memory.process.isolated_process import check_build, forked_or_sent, in_fresh_process
from flatout.memory.trace.make_trace import NATIVE, RULED, import_before_forking, trace_here, trace_natively
from flatout.memory.trace.record import Trace

CONTEXT_BYTES = 600 << 20
CONTEXT = Decision(
    value=CONTEXT_BYTES,
    reason="a CUDA context with the kernels of a training job takes 500 to 600 MiB; a probe measures it",
    source="assumed",
)
Parallel = Literal["ddp", "fsdp2"]
MOST_RETRIES = 8
WORTH_RAISING = 0.06  # of the cap, left free
SCATTER = 0.02  # of reserved bytes: what an estimate is commonly off by, kept free under a safe batch
KEPT_FREE = 0.0125  # of the cap, under a tight batch: 1 % was enough in 59 of 60 searches on an H200
LENGTH = "length"
NATIVE_AT_ONCE = 2  # each takes a CUDA context of the GPU
SAMPLES = (8, 16, 24)  # batches: multiples of most numbers of experts, and above special cases such as 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """How large a batch may be; 0: not even 1.

    `safe` never makes the allocator flush.  `tight` is the largest to rely on: the allocator may hand memory
    back and ask again, `num_flushes` times a step once the run has settled; not so under expandable segments,
    where a flush a step cost 17 % of the speed.  At `limit` nothing is kept free for a low estimate.
    """

    safe: int
    limit: int
    reserved_bytes: int | None = None  # at `safe`
    tight: int = 0
    num_flushes: int | None = None  # at `tight`, in a step after the first ones


class Forecaster:
    """Forecasts for one job on one device; traces are kept.

    With `native`, traces are made on tensors without data of the GPU that is here (`tracing`).

    With `expandable_segments` the allocator is that of `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`
    (`allocator.expandable_segments_of` reads the variable's value).
    """

    def __init__(
        self,
        job: Job,
        *,
        device: Device | str | None = None,
        context: Decision[int] = CONTEXT,
        ranks: int = 1,
        parallel: Parallel = "ddp",
        expandable_segments: bool = False,
        native: bool = False,
        knobs: Sequence[str] = (BATCH,),
        on_progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        if ranks < 1 or parallel not in ("ddp", "fsdp2"):
            raise BadInput(f"ranks={ranks} and parallel={parallel!r}: at least 1 rank, under ddp or fsdp2")
        unknown = [knob for knob in knobs if knob not in job.sizes]
        if unknown:
            raise BadInput(
                f"{', '.join(unknown)} is no size of {job.name}", hint=f"it has {', '.join(job.sizes)}"
            )
        if native:
            check_build(NATIVE)
        self.job = job
        self.native = native
        self.expandable_segments = expandable_segments
        self.knobs = tuple(dict.fromkeys((BATCH, *knobs)))
        self.ranks, self.parallel = ranks, parallel
        self.device = simulated_device(device) if isinstance(device, str) else device
        self.context = context
        self.on_progress = on_progress
        self._replays: dict[tuple[Recipe, tuple[tuple[str, int], ...]], Replay | None] = {}
        self._traces: dict[tuple[Recipe, tuple[tuple[str, int], ...]], Trace] = {}
        self._joint: dict[tuple[Recipe, tuple[tuple[str, int], ...]], Replay | None] = {}
        self._quick: dict[tuple[Recipe, tuple[tuple[str, int], ...]], Trace] = {}

    # -- answers

    def estimate(
        self, recipe: Recipe, *, sizes: Sizes | None = None, lengths: Mapping[int, int] | None = None
    ) -> MemoryEstimate:
        """What one step takes at `sizes`, traced at these very sizes."""
        trace = self.trace(recipe, self._complete(sizes, lengths))
        return estimate(
            trace,
            constants=workspaces_for(self.device),
            context_bytes=self.context.value,
            expandable_segments=self.expandable_segments,
            precision=recipe.precision,
            device=self.device.name if self.device else None,
        )

    def what_if(self, recipe: Recipe, *, sizes: Sizes | None = None) -> SizedTrace:
        """The step at `sizes`: replayed where it follows from small traces, else traced."""
        wanted = self._complete(sizes)
        for replay_of in (self._joint_replay, self._replay):
            replay = replay_of(recipe, wanted)
            if replay is not None and replay.covers(**wanted):
                try:
                    return replay.at(**wanted)
                except StructureChanges:
                    pass
        return sized(self._quick_trace(recipe, wanted))

    def largest_batch(
        self,
        recipe: Recipe,
        *,
        cap_bytes: int,
        sizes: Sizes | None = None,
        lengths: Mapping[int, int] | None = None,
    ) -> Largest:
        """The largest batches within `cap_bytes` of the allocator; `limit` alone is not traced itself."""
        wanted = self._complete(sizes, lengths)

        def step_at(batch_size: int) -> SizedTrace:
            return self.what_if(recipe, sizes={**wanted, BATCH: batch_size})

        safe_bytes = int(cap_bytes * (1 - SCATTER))
        expandable = self.expandable_segments
        safe = search(step_at, capacity_bytes=safe_bytes, expandable_segments=expandable).safe.value
        limit = search(step_at, capacity_bytes=cap_bytes, expandable_segments=expandable).limit.value
        safe, reserved = self._verified(recipe, wanted, safe, safe_bytes)
        kept_bytes = int(cap_bytes * (1 - KEPT_FREE))
        if expandable:
            guess = search(step_at, capacity_bytes=kept_bytes, expandable_segments=True).safe.value
        else:
            below = LOOKED_BELOW if self._replay(recipe, wanted) else 0.0  # where no size costs a trace
            guess = unbroken_batch(step_at, capacity_bytes=kept_bytes, looked_below=below)
        tight, num_flushes = self._trained(recipe, wanted, guess, kept_bytes, at_least=safe)
        return Largest(
            safe=safe,
            limit=max(tight, limit),
            reserved_bytes=reserved,
            tight=tight,
            num_flushes=num_flushes,
        )

    def simulate(self, step: SizedTrace, *, cap_bytes: int | None = None) -> Simulation:
        """What the allocator of this forecaster does with a step."""
        expandable, num_bytes = self.expandable_segments, step.num_bytes
        return simulate(step.trace.events, num_bytes, cap_bytes=cap_bytes, expandable_segments=expandable)

    def _verified(
        self, recipe: Recipe, sizes: Sizes, batch_size: int, cap_bytes: int
    ) -> tuple[int, int | None]:
        """The batch, or one near it, whose own trace stays within the cap, and what that reserves.

        Too large ones are lowered until they fit; one that leaves much free is raised as long as it fits.
        """
        best: tuple[int, int | None] = (0, None)
        for _ in range(MOST_RETRIES):
            if batch_size < 1:
                break
            step = sized(self.trace(recipe, {**sizes, BATCH: batch_size}))
            reserved = self.simulate(step).peak_reserved_bytes
            scaled = min(int(batch_size * cap_bytes / reserved), MAX_BATCH)
            if self._never_flushes(step, cap_bytes):
                best = (batch_size, reserved)
                if reserved > cap_bytes * (1 - WORTH_RAISING) or scaled == batch_size:
                    break
                batch_size = scaled
            elif best[0]:
                break
            else:
                batch_size = min(batch_size - 1, scaled)
        return best

    def _never_flushes(self, step: SizedTrace, cap_bytes: int) -> bool:
        """Not the same as reserving less than the cap: an expandable segment asks for all of a request."""
        done = self.simulate(step, cap_bytes=cap_bytes)
        return done.out_of_memory_at is None and not done.num_flushes

    def _trained(
        self, recipe: Recipe, sizes: Sizes, batch_size: int, cap_bytes: int, *, at_least: int
    ) -> tuple[int, int | None]:
        """The batch, or one below, whose own trace trains for several steps, and its flushes in a step.

        A guess is commonly right or one percent off; where it is not, as where a kernel changes between the
        small traces and the large batch, larger and larger steps down find one that trains.
        """
        low, high, step = at_least, 0, max(1, batch_size // 100)
        num_flushes = 0 if at_least else None
        for _ in range(MOST_RETRIES):
            if batch_size <= low:
                break
            run = repeated(sized(self.trace(recipe, {**sizes, BATCH: batch_size})))
            found = run.flushes(cap_bytes=cap_bytes, expandable_segments=self.expandable_segments)
            if found is None or (found and self.expandable_segments):
                high = batch_size
            else:
                low, num_flushes = batch_size, found
            if high - low <= max(1, low // 100):
                break
            batch_size, step = high - step if low == at_least else (low + high) // 2, 2 * step
            if batch_size <= low:
                batch_size = (low + high) // 2
        return low, num_flushes

    # -- traces

    def trace(self, recipe: Recipe, sizes: Sizes) -> Trace:
        key = (recipe, _key(sizes))
        if key not in self._traces:
            self._traces[key] = self.make_traces(recipe, [sizes])[0]
        return self._traces[key]

    def _quick_trace(self, recipe: Recipe, sizes: Sizes) -> Trace:
        """A trace for a search: of several accumulated micro-batches the last one only."""
        if recipe.accumulation == 1 or recipe.mode != "train":
            return self.trace(recipe, sizes)
        key = (recipe, _key(sizes))
        if key not in self._quick:
            self._quick[key] = self.make_traces(recipe, [sizes], quick=True)[0]
        return self._quick[key]

    def _replay(self, recipe: Recipe, sizes: Sizes) -> Replay | None:
        """A replay in the batch size, the other sizes as they are; None where the job has none."""
        key = (recipe, _key({name: size for name, size in sizes.items() if name != BATCH}))
        if key not in self._replays:
            self._replays[key] = self._fitted(recipe, sizes)
        return self._replays[key]

    def _joint_replay(self, recipe: Recipe, sizes: Sizes) -> Replay | None:
        """A replay in every knob, the other sizes as they are; None without knobs beside the batch."""
        if len(self.knobs) == 1:
            return None
        key = (recipe, _key({name: size for name, size in sizes.items() if name not in self.knobs}))
        if key not in self._joint:
            try:
                own = {name: self.job.sizes[name] for name in self.knobs}  # what a model has positions for
                samples = sample_sizes({**sizes, **own}, knobs=self.knobs)
                self._joint[key] = fit_replay(self.make_traces(recipe, samples, quick=True))
            except StructureChanges:
                self._joint[key] = None
        return self._joint[key]

    def _fitted(self, recipe: Recipe, sizes: Sizes) -> Replay | None:
        samples = [{**sizes, BATCH: batch_size} for batch_size in SAMPLES]
        try:
            return fit_replay(self.make_traces(recipe, samples, quick=True), exact=False)
        except StructureChanges:
            return None

    def make_traces(self, recipe: Recipe, all_sizes: Iterable[Sizes], *, quick: bool = False) -> list[Trace]:
        """A trace at each of `all_sizes`, in their order; `quick` ones are for a search.

        Every trace comes through here: a forecaster that keeps traces elsewhere overrides it, and calls it
        for those that it has not.
        """
        chosen = [dict(sizes) for sizes in all_sizes]
        batches = ", ".join(str(sizes[BATCH]) for sizes in chosen)
        self.on_progress(f"tracing {self.job.name}, {_describe(recipe)}, at batch {batches}")

        import_before_forking()
        last = quick and recipe.accumulation > 1 and recipe.mode == "train"

        def one(sizes: Sizes) -> Trace:
            make = trace_natively if self.native else trace_here
            work = partial(make, self.job, recipe, sizes, device=self.device, last_micro_batch=last)
            run, what = (in_fresh_process, NATIVE) if self.native else (forked_or_sent, RULED)
            trace = run(work, what=what)
            return self._of_one_rank(trace, recipe)

        num_at_once = NATIVE_AT_ONCE if self.native else len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(max_workers=num_at_once) as pool:
            return list(pool.map(one, chosen))

    def _of_one_rank(self, trace: Trace, recipe: Recipe) -> Trace:
        if self.ranks == 1 or recipe.mode != "train":
            return trace
        from flatout.memory.predict import parallel
        from flatout.memory.predict.fsdp_units import units_of_job

        if self.parallel == "ddp":
            return parallel.with_ddp(trace)
        units = forked_or_sent(units_of_job, self.job, recipe, what=RULED)
        return parallel.with_fsdp2(trace, ranks=self.ranks, units=units)

    def _complete(self, sizes: Sizes | None, lengths: Mapping[int, int] | None = None) -> dict[str, int]:
        if lengths is not None:
            sizes = {**(sizes or {}), LENGTH: longest(lengths)}
        unknown = set(sizes or ()) - set(self.job.sizes)
        if unknown:
            raise BadInput(
                f"{', '.join(sorted(unknown))} is no size of {self.job.name}",
                hint=f"it has {', '.join(self.job.sizes)}",
            )
        return {**self.job.sizes, **(sizes or {})}


def estimate_job(
    job: Job,
    recipe: Recipe | None = None,
    *,
    sizes: Sizes | None = None,
    device: Device | str | None = None,
    ranks: int = 1,
    parallel: Parallel = "ddp",
    expandable_segments: bool = False,
    native: bool = False,
    lengths: Mapping[int, int] | None = None,
    on_progress: Callable[[str], None] = lambda message: None,
) -> MemoryEstimate:
    """What one step of `job` takes on `device`, which is one of `ranks`."""
    forecaster = Forecaster(
        job,
        device=device,
        ranks=ranks,
        parallel=parallel,
        expandable_segments=expandable_segments,
        native=native,
        on_progress=on_progress,
    )
    return forecaster.estimate(recipe or Recipe(), sizes=sizes, lengths=lengths)


def largest_batch(
    job: Job,
    recipe: Recipe | None = None,
    *,
    cap_bytes: int,
    sizes: Sizes | None = None,
    device: Device | str | None = None,
    expandable_segments: bool = False,
    native: bool = False,
    lengths: Mapping[int, int] | None = None,
) -> Largest:
    """The largest batch of `job` within `cap_bytes` of the allocator."""
    forecaster = Forecaster(job, device=device, expandable_segments=expandable_segments, native=native)
    return forecaster.largest_batch(recipe or Recipe(), cap_bytes=cap_bytes, sizes=sizes, lengths=lengths)


def _key(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(sizes.items()))


def _describe(recipe: Recipe) -> str:
    parts: list[str] = [recipe.precision, recipe.mode]
    if recipe.checkpointing:
        parts.append("checkpointing")
    if recipe.accumulation > 1:
        parts.append(f"accumulation {recipe.accumulation}")
    return ", ".join(parts)
