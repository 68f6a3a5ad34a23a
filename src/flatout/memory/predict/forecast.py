"""The memory of a job on a device, in the user's terms: how much, and how large a batch.

A `Forecaster` replays a step from small traces (`steps`) and simulates PyTorch's allocator on it.  An answer
that matters is traced again at its own sizes: if the step allocates differently there than at small sizes,
that trace counts.  If lengths vary, the longest batch decides: give a histogram of them as `lengths`, length
-> how often.

A plan asks about whole processes: the allocator's bytes and the CUDA context.  A peak costs one trace at its
own sizes.  A largest batch costs three small traces, a search in what follows from them, and one trace that
verifies each answer; after that, every other batch of the same job needs no trace.  With `profile` each
recipe is also run for real at two small batches, and what the traces missed there corrects the answers.  The
seconds of a micro-batch are measured at its own batch size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.hardware.device import Device
from flatout.memory.jobs.job import Job, Recipe, Sizes
from flatout.memory.predict.allocator import Simulation
from flatout.memory.predict.estimate import MemoryEstimate, estimate
from flatout.memory.predict.largest_batch import LOOKED_BELOW, MAX_BATCH, CapSearch, longest
from flatout.memory.predict.notes import LEANS, notes_on_guesses
from flatout.memory.predict.repeat_steps import repeat_steps
from flatout.memory.predict.replay import SizedTrace, with_own_sizes
from flatout.memory.predict.samples import BATCH
from flatout.memory.predict.steps import StepOptions, TracedSteps, TraceKey

if TYPE_CHECKING:
    from flatout.hardware.device import Device
    from flatout.memory.probe.probe_results import ProbedBatch, ProbeResult
    from flatout.memory.trace.record import Guess


CONTEXT_BYTES = 600 << 20
CONTEXT = Decision(
    value=CONTEXT_BYTES,
    reason="a CUDA context with the kernels of a training job takes 500 to 600 MiB; a probe measures it",
    source="assumed",
)
MOST_RETRIES = 8
WORTH_RAISING = 0.06  # of the cap, left free
SCATTER = 0.02  # of reserved bytes: what an estimate is commonly off by, kept free under a safe batch
KEPT_FREE = 0.0125  # of the cap, under a tight batch: 1 % was enough in 59 of 60 searches on an H200
LENGTH = "length"
# What a caveat is about: kernels were measured on one generation, and some guesses cannot be too low.
MEASURED_CAPABILITY = "9.0"  # an H200
LARGEST_ANSWERS = ("every element", "upper end")  # words of a guess that cannot be too low
MOST_MADE = 8192  # rows: a larger batch, which the batch maker would fill, follows from small ones
# The second micro-batch meets the gradients of the first; a third meets nothing that the second did not.
TRACED_ACCUMULATION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The largest batches; 0: not even 1 fits.

    `safe` never makes the allocator flush.  `tight` is the largest to rely on: the allocator may hand memory
    back and ask again, `num_flushes` times a step once the run has settled; not so under expandable segments,
    where a flush a step cost 17 % of the speed.  At `limit` nothing is kept free for a low estimate.
    """

    safe: int
    limit: int
    reserved_bytes: int | None = None  # at `safe`
    tight: int = 0
    num_flushes: int | None = None  # at `tight`, in a step after the first ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most a step holds: by tensors, by PyTorch's allocator, and by the whole process on the device."""

    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int  # reserved, and the CUDA context: what has to fit beside everybody else


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchBounds:
    """`tight` is the largest that trains within a capacity, though the allocator may have to hand memory back
    and ask again; up to `safe` it never holds more than the capacity.  None: not even 1.
    """

    safe: int | None
    tight: int | None


def limit_accumulation(recipe: Recipe) -> Recipe:
    """Return the recipe with no more accumulation than memory can tell apart."""
    return dataclasses.replace(recipe, accumulation=min(recipe.accumulation, TRACED_ACCUMULATION))


class Forecaster(TracedSteps):
    """Forecasts for one job on one device; traces and answers are kept.

    With `expandable_segments` the allocator is that of `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`
    (`allocator.expandable_segments_of` reads the variable's value).
    """

    def __init__(
        self,
        job: Job,
        *,
        context: Decision[int] = CONTEXT,
        expandable_segments: bool = False,
        profile: bool = False,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(job, **options)
        self.context = context
        self.expandable_segments = expandable_segments
        self._profile = profile
        self._stages: dict[str, Forecaster] = {}
        self._probe_results: dict[TraceKey, ProbeResult] = {}
        self._timed: dict[tuple[TraceKey, int], float | None] = {}
        self._bounds: dict[tuple[TraceKey, int], BatchBounds] = {}
        self._peaks: dict[tuple[TraceKey, int], Peak] = {}
        self._searched_for: set[TraceKey] = set()  # a replay is at hand
        self._traced_at: set[tuple[TraceKey, int]] = (
            set()
        )  # (what, batch): a trace of these very sizes is at hand

    def estimate(
        self, recipe: Recipe, *, sizes: Sizes | None = None, lengths: Mapping[int, int] | None = None
    ) -> MemoryEstimate:
        """Estimate one step at `sizes`, traced at these very sizes."""
        trace = self.trace(recipe, self._complete(_with_longest(sizes, lengths)))
        return estimate(
            trace,
            context_bytes=self.context.value,
            expandable_segments=self.expandable_segments,
            precision=recipe.precision,
            device=self.device,
        )

    def largest_batch(
        self,
        recipe: Recipe,
        *,
        cap_bytes: int,
        sizes: Sizes | None = None,
        lengths: Mapping[int, int] | None = None,
    ) -> Largest:
        """Return the largest batches within `cap_bytes` of the allocator; all but `limit` are traced."""
        wanted = self._complete(_with_longest(sizes, lengths))

        def search(within_bytes: int) -> CapSearch:
            return CapSearch(
                lambda batch_size: self.what_if(recipe, sizes={**wanted, BATCH: batch_size}),
                cap_bytes=within_bytes,
                expandable_segments=self.expandable_segments,
            )

        safe_bytes, kept_bytes = int(cap_bytes * (1 - SCATTER)), int(cap_bytes * (1 - KEPT_FREE))
        guess, limit = search(safe_bytes).safe_batch(), search(cap_bytes).limit_batch()
        safe, reserved = self._verify_batch(recipe, wanted, guess, safe_bytes)
        if self.expandable_segments:
            guess = search(kept_bytes).safe_batch()
        else:
            below = LOOKED_BELOW if self._replay(recipe, wanted) else 0.0  # only if no size costs a trace
            guess = search(kept_bytes).unbroken_batch(looked_below=below)
        tight, num_flushes = self._find_trained(recipe, wanted, guess, kept_bytes, at_least=safe)
        return Largest(
            safe=safe,
            limit=max(tight, limit),
            reserved_bytes=reserved,
            tight=tight,
            num_flushes=num_flushes,
        )

    def simulate(self, step: SizedTrace, *, cap_bytes: int | None = None) -> Simulation:
        """Simulate what this forecaster's allocator does with a run of such steps."""
        run = repeat_steps(step)
        return run.simulate(cap_bytes=cap_bytes, expandable_segments=self.expandable_segments)

    def _verify_batch(
        self, recipe: Recipe, sizes: Sizes, batch_size: int, cap_bytes: int
    ) -> tuple[int, int | None]:
        """Return the batch, or one near it, whose own trace stays within the cap, and what it reserves.

        Too large ones are lowered until they fit; one that leaves much free is raised as long as it fits.
        """
        best: tuple[int, int | None] = (0, None)
        for _ in range(MOST_RETRIES):
            if batch_size < 1:
                break
            step = with_own_sizes(self.trace(recipe, {**sizes, BATCH: batch_size}))
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
        """Return whether the step runs without a flush (expandable segments may flush below the cap)."""
        done = self.simulate(step, cap_bytes=cap_bytes)
        return done.out_of_memory_at is None and not done.num_flushes

    def _find_trained(
        self, recipe: Recipe, sizes: Sizes, batch_size: int, cap_bytes: int, *, at_least: int
    ) -> tuple[int, int | None]:
        """Return the batch, or one below, whose own trace trains for several steps, and its flushes.

        A guess is commonly right or one percent off; if it is not, because a kernel changes between the
        small traces and the large batch, larger and larger steps down find one that trains.
        """
        low, high, step = at_least, 0, max(1, batch_size // 100)
        num_flushes = 0 if at_least else None
        for _ in range(MOST_RETRIES):
            if batch_size <= low:
                break
            run = repeat_steps(with_own_sizes(self.trace(recipe, {**sizes, BATCH: batch_size})))
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

    # A plan's questions

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the job's batch maker, with the job's own values."""
        return self.job.sizes

    @property
    def caveats(self) -> tuple[str, ...]:
        """What in the answers so far may be too low, each as a clause."""
        return caveats_of(self.guesses, device=None if self._profile else self.device)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the answers so far lean on, each as a sentence."""
        leaning = (sentence for lean, sentence in LEANS.items() if lean in self.leans_on)
        return (*leaning, *notes_on_guesses(self.guesses))

    def of_stage(self, name: str) -> Forecaster:
        """Return the forecast of one stage: a stage may train another model."""
        return self._stages.get(name, self)

    def set_stage(self, name: str, other: Forecaster) -> None:
        self._stages[name] = other

    def peak_bytes(self, sizes: Sizes, *, recipe: Recipe) -> Peak:
        """Return what one step needs at these sizes, `batch_size` among them."""
        recipe = limit_accumulation(recipe)
        at = (_without_batch(recipe, sizes), sizes[BATCH])
        if at not in self._peaks:
            found: Simulation | MemoryEstimate
            if self._profile:
                found = self._correct_estimate(sizes, recipe)
            elif self._is_replayed(sizes, recipe):
                found = self.simulate(self._step(sizes, recipe))
            else:
                found = self.estimate(recipe, sizes=sizes)
            self._peaks[at] = Peak(
                allocated_bytes=found.peak_allocated_bytes,
                reserved_bytes=found.peak_reserved_bytes,
                process_bytes=found.peak_reserved_bytes + self._context_bytes(recipe, sizes),
            )
        return self._peaks[at]

    def trains(self, sizes: Sizes, *, recipe: Recipe, capacity_bytes: int) -> bool:
        """Return whether the steps run on a device where the process gets no more than `capacity_bytes`."""
        recipe = limit_accumulation(recipe)
        cap_bytes = capacity_bytes - self._beside_bytes(sizes, recipe)
        if cap_bytes <= 0:
            return False
        flushes = repeat_steps(self._step(sizes, recipe)).flushes(
            cap_bytes=int(cap_bytes * (1 - KEPT_FREE)), expandable_segments=self.expandable_segments
        )
        return flushes is not None and not (flushes and self.expandable_segments)

    def largest_within(self, sizes: Sizes, *, recipe: Recipe, capacity_bytes: int) -> BatchBounds:
        """Return the largest batch that trains, and the largest that never holds more."""
        recipe = limit_accumulation(recipe)
        what = _without_batch(recipe, sizes)
        if (what, capacity_bytes) not in self._bounds:
            found = self._search_bounds(recipe, sizes, capacity_bytes)
            self._bounds[what, capacity_bytes] = found
            self._searched_for.add(what)
            self._traced_at |= {(what, batch) for batch in (found.safe, found.tight) if batch is not None}
        return self._bounds[what, capacity_bytes]

    def step_s(self, sizes: Sizes, *, recipe: Recipe) -> float | None:
        """Return the seconds of a micro-batch, measured at this very batch: small ones do not tell.

        None if nothing was measured, or if the batch did not run.
        """
        if not self._profile:
            return None
        recipe, batch_size = limit_accumulation(recipe), sizes[BATCH]
        probes = {probe.batch_size: probe for probe in self._probe_result(recipe, sizes).probes}
        at = (_without_batch(recipe, sizes), batch_size)
        if at not in self._timed:
            found = probes.get(batch_size) or self._probed_at(recipe, sizes)
            self._timed[at] = found.micro_batch_s if found is not None else None
        return self._timed[at]

    def _probed_at(self, recipe: Recipe, sizes: Sizes) -> ProbedBatch | None:
        from flatout.memory.probe.run_probe import probe

        batch_size = sizes[BATCH]
        self.on_progress(f"timing {self.job.name} at batch {batch_size}")
        try:
            return probe(self.job, recipe, sizes={**self.sizes, **sizes}, batch_sizes=(batch_size,)).probes[0]
        except BadInput as error:
            self.on_progress(f"batch {batch_size} is not timed: {error.message}")
            return None

    def _step(self, sizes: Sizes, recipe: Recipe) -> SizedTrace:
        if self._is_replayed(sizes, recipe):
            return self.what_if(recipe, sizes=sizes)
        return with_own_sizes(self.trace(recipe, {**self.sizes, **sizes}))

    def _is_replayed(self, sizes: Sizes, recipe: Recipe) -> bool:
        """Return whether the step is replayed: a replay is at hand, or the batch is too large to make."""
        what = _without_batch(recipe, sizes)
        if (what, sizes[BATCH]) in self._traced_at:
            return False
        return what in self._searched_for or sizes[BATCH] > MOST_MADE

    def _search_bounds(self, recipe: Recipe, sizes: Sizes, capacity_bytes: int) -> BatchBounds:
        others = {name: size for name, size in sizes.items() if name != BATCH}
        cap_bytes = capacity_bytes - self._context_bytes(recipe, sizes)
        if cap_bytes <= 0:
            return BatchBounds(safe=None, tight=None)
        found = self.largest_batch(recipe, cap_bytes=cap_bytes, sizes=others)
        if self._profile and found.tight:
            # What the traces miss at a real step is taken from the cap, and the search made again below it.
            beside = self._beside_bytes({**others, BATCH: found.tight}, recipe)
            cap_bytes = max(1, capacity_bytes - beside)
            found = self.largest_batch(recipe, cap_bytes=cap_bytes, sizes=others)
        return BatchBounds(safe=found.safe or None, tight=found.tight or None)

    def _beside_bytes(self, sizes: Sizes, recipe: Recipe) -> int:
        """Return what a process takes in addition to the trace: the context, and a real run's excess."""
        context = self._context_bytes(recipe, sizes)
        if not self._profile:
            return context
        plain = self.estimate(recipe, sizes=sizes).peak_reserved_bytes
        return context + max(0, self._correct_estimate(sizes, recipe).peak_reserved_bytes - plain)

    def _correct_estimate(self, sizes: Sizes, recipe: Recipe) -> MemoryEstimate:
        from flatout.memory.probe.probe_results import correct

        result = self._probe_result(recipe, sizes)
        at_probes = [
            self.estimate(recipe, sizes={**sizes, BATCH: probe.batch_size}) for probe in result.probes
        ]
        return correct(self.estimate(recipe, sizes=sizes), result, at_probes=at_probes)

    def _context_bytes(self, recipe: Recipe, sizes: Sizes) -> int:
        measured = self._probe_result(recipe, sizes).context_bytes if self._profile else None
        return self.context.value if measured is None else measured

    def _probe_result(self, recipe: Recipe, sizes: Sizes) -> ProbeResult:
        from flatout.memory.probe.run_probe import probe

        key = _without_batch(recipe, sizes)
        if key not in self._probe_results:
            self.on_progress(f"running {self.job.name} for a few steps")
            self._probe_results[key] = probe(self.job, recipe, sizes={**self.sizes, **sizes})
        return self._probe_results[key]


def _without_batch(recipe: Recipe, sizes: Sizes) -> TraceKey:
    return recipe, tuple(sorted((name, size) for name, size in sizes.items() if name != BATCH))


def _with_longest(sizes: Sizes | None, lengths: Mapping[int, int] | None) -> Sizes | None:
    return sizes if lengths is None else {**(sizes or {}), LENGTH: longest(lengths)}


def estimate_job(
    job: Job,
    recipe: Recipe | None = None,
    *,
    sizes: Sizes | None = None,
    lengths: Mapping[int, int] | None = None,
    expandable_segments: bool = False,
    **options: Unpack[StepOptions],
) -> MemoryEstimate:
    """Return the memory of one step of `job`, on `device` and as one of `ranks` if the options name them."""
    forecaster = Forecaster(job, expandable_segments=expandable_segments, **options)
    return forecaster.estimate(recipe or Recipe(), sizes=sizes, lengths=lengths)


def caveats_of(guesses: Collection[Guess], *, device: Device | None) -> tuple[str, ...]:
    """Say what may be too low, each as a clause; `device` is None if the job was run on it.

    For sizes that depend on data, a trace mostly assumes the largest possible one.  It spreads a choice among
    experts evenly, and invents a number that decides a branch.  Kernels other than the measured ones follow
    PyTorch's documented order and the formulas of the measured ones.
    """
    open_ones = [guess for guess in guesses if not any(words in guess.answer for words in LARGEST_ANSWERS)]
    caveats = []
    if open_ones:
        answer = min(guess.answer for guess in open_ones)
        places = "a place" if len(open_ones) == 1 else f"{len(open_ones)} places"
        caveats.append(f"what is computed depends on data in {places} ({answer})")
    if device is not None and device.compute_capability is None:
        caveats.append(f"it is not known which kernels run on {device.name}")
    elif device is not None and device.compute_capability != MEASURED_CAPABILITY:
        caveats.append(f"the kernels of {device.name} have not been measured")
    return tuple(caveats)
