"""What fits on a device: one judge for `show`, for `fit` and for the remedies.

The budget is a margin of what is free, not of what the device has.  A GPU in this machine may have other
users, and the driver reports what they hold.  A GPU that is not in this machine is assumed to be empty; its
total is the driver's figure if the datasheet records it.

A step *fits* when it trains within the margin: if the memory ended there, PyTorch's allocator would at most
hand cached blocks back and ask again.  No allocator is capped at a margin, so a job that fits may hold more
than that, up to what is free, while no other process uses it; the memory beyond the margin is head room for
an estimate that is too low.  A step is *safe* when the process never holds more than the margin.

The largest batch that fits is what a plan recommends.  Where a part of the estimate is a guess, it has a
tenth of what is free for head room, whatever the margin, or is safe, and the plan says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput, UnknownDevice
from flatout.ground.units import show_bytes, show_share
from flatout.hardware.device import Device
from flatout.hardware.nvml import read_gpus
from flatout.hardware.simulated import simulated_device
from flatout.hardware.snapshot import GpuSnapshot, Snapshot
from flatout.memory.jobs.job import Recipe
from flatout.memory.predict.forecast import CONTEXT_BYTES, BatchBounds, Peak
from flatout.memory.predict.notes import notes_on_device
from flatout.planner.config.settings import StageSettings

DEFAULT_MARGIN = 0.85
SURE_MARGIN = 0.9  # the head room that is left beyond it stands in for a guess


class Forecast(Protocol):
    """The memory side of a plan, for one job on one device: a `Forecaster`, or in a test a straight line."""

    @property
    def sizes(self) -> Mapping[str, int]: ...

    @property
    def caveats(self) -> tuple[str, ...]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def peak_bytes(self, sizes: Mapping[str, int], *, recipe: Recipe) -> Peak: ...

    def trains(self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int) -> bool: ...

    def largest_within(
        self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int
    ) -> BatchBounds: ...

    def step_s(self, sizes: Mapping[str, int], *, recipe: Recipe) -> float | None: ...

    def of_stage(self, name: str) -> Forecast: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The memory of a device, what is free of it, and the share of that which a plan may use."""

    device: Device
    total_bytes: int
    free_bytes: Decision[int]
    margin: float

    @property
    def usable_bytes(self) -> int:
        return int(self.free_bytes.value * self.margin)


def find_budget(
    *,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    margin: float = DEFAULT_MARGIN,
    ranks: int = 1,
    read: Callable[[], Snapshot] = read_gpus,
) -> Budget:
    """Find the budget on a named GPU, on so much memory, or on the GPUs of this machine."""
    if not 0 < margin <= 1:
        raise BadInput(
            f"--margin {margin:g} is not a share of the free memory", hint="0.85 leaves 15 % to spare"
        )
    if gpu is not None and gpu_memory is not None:
        raise BadInput("--gpu and --gpu-memory name two devices", hint="give one of them")
    if gpu is not None:
        return _empty_device(simulated_device(gpu), margin=margin)
    if gpu_memory is not None:
        memory = gpu_memory.strip()
        try:
            is_number = memory.replace(".", "", 1).isdigit()
            device = simulated_device(f"{memory}GB" if is_number else memory)
        except UnknownDevice:
            raise BadInput(
                f"--gpu-memory {gpu_memory!r} is not a size", hint='write "24GB"; a GPU is named with --gpu'
            ) from None
        return _empty_device(device, margin=margin)
    return _budget_here(read(), margin=margin, ranks=ranks)


def _empty_device(device: Device, *, margin: float) -> Budget:
    assert device.memory_bytes is not None  # a simulated device is made from its memory
    reason = "assumed empty, as it is not here"
    if device.datasheet is None and device.source is not None:
        reason += f": {device.source}"
    free = Decision(value=device.memory_bytes, reason=reason, source="datasheet")
    budget = Budget(device=device, total_bytes=device.memory_bytes, free_bytes=free, margin=margin)
    if budget.usable_bytes <= CONTEXT_BYTES:
        raise BadInput(
            f"{device.name} offers {show_bytes(budget.usable_bytes)} at a margin of {show_share(margin)},"
            f" and a CUDA context alone takes about {show_bytes(CONTEXT_BYTES)}",
            hint="nothing trains there; name a larger GPU",
        )
    return budget


def _budget_here(snapshot: Snapshot, *, margin: float, ranks: int) -> Budget:
    """Return the budget of the tightest of the GPUs that the ranks use."""
    hint = "plan for one that is not here: --gpu A100-80GB or --gpu-memory 24GB"
    known = [
        gpu for gpu in snapshot.computing if gpu.memory_total_bytes and gpu.memory_free_bytes is not None
    ]
    if not known:
        raise BadInput(f"no GPU to plan for: {snapshot.why_no_gpu}", hint=hint)
    tightest = min(known[:ranks], key=_free)
    device = tightest.device
    if device is None or tightest.memory_total_bytes is None:
        raise BadInput("the GPU does not report its name", hint=hint)
    free = Decision(
        value=_free(tightest), reason=f"the driver reports it for GPU {tightest.index}", source="measured"
    )
    return Budget(device=device, total_bytes=tightest.memory_total_bytes, free_bytes=free, margin=margin)


def _free(gpu: GpuSnapshot) -> int:
    return gpu.memory_free_bytes or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """What fits into the margin of a device."""

    budget: Budget
    forecast: Forecast

    def caution(self, stage: StageSettings) -> str | None:
        """Return why the margin is not used up; None if it is."""
        caveats = self.forecast.of_stage(stage.name).caveats
        if self.budget.margin <= SURE_MARGIN or not caveats:
            return None
        spared = show_share(1 - self.budget.margin)
        return f"a margin of {show_share(self.budget.margin)} spares {spared}, and {caveats[0]}"

    def peak(self, stage: StageSettings, sizes: Mapping[str, int], recipe: Recipe) -> Peak:
        """Return what a step holds if nothing stops it."""
        return self.forecast.of_stage(stage.name).peak_bytes(sizes, recipe=recipe)

    def held(self, peak: Peak) -> Peak:
        """Return what a step that fits holds: at the end of free memory, cached blocks are handed back."""
        over = max(0, peak.process_bytes - self.budget.free_bytes.value)
        return dataclasses.replace(
            peak, reserved_bytes=peak.reserved_bytes - over, process_bytes=peak.process_bytes - over
        )

    def fits(self, stage: StageSettings, sizes: Mapping[str, int], recipe: Recipe) -> bool:
        """Return whether a step trains within the margin, and also where the memory really ends.

        More memory usually helps but may not, because the allocator then releases memory at another moment.
        """
        held = self.peak(stage, sizes, recipe=recipe).process_bytes
        within = self._relied_bytes(stage)
        if within < held <= self.budget.usable_bytes:  # safe
            within = self.budget.usable_bytes
        if not self._trains(stage, sizes, recipe=recipe, capacity_bytes=within):
            return False
        return held <= self.budget.free_bytes.value or self.runs(stage, sizes, recipe=recipe)

    def _relied_bytes(self, stage: StageSettings) -> int:
        """Return the margin, or less if a guess needs head room."""
        sure_bytes = int(self.budget.free_bytes.value * SURE_MARGIN)
        return self.budget.usable_bytes if self.caution(stage) is None else sure_bytes

    def runs(self, stage: StageSettings, sizes: Mapping[str, int], recipe: Recipe) -> bool:
        """Return whether a step trains within all that is free."""
        return self._trains(stage, sizes, recipe=recipe, capacity_bytes=self.budget.free_bytes.value)

    def _trains(
        self, stage: StageSettings, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int
    ) -> bool:
        forecast = self.forecast.of_stage(stage.name)
        return forecast.trains(sizes, recipe=recipe, capacity_bytes=capacity_bytes)

    def largest(self, stage: StageSettings, sizes: Mapping[str, int], recipe: Recipe) -> BatchBounds:
        """Return the largest batches within the margin; `tight` is the recommended one."""
        forecast = self.forecast.of_stage(stage.name)
        found = forecast.largest_within(sizes, recipe=recipe, capacity_bytes=self.budget.usable_bytes)
        if found.tight is None or found.tight == found.safe:
            return found
        if self.caution(stage) is not None:
            relied_bytes = self._relied_bytes(stage)
            sure = forecast.largest_within(sizes, recipe=recipe, capacity_bytes=relied_bytes).tight
            found = dataclasses.replace(found, tight=max(found.safe or 0, sure or 0) or None)
        if found.tight is None or self.fits(stage, {**sizes, "batch_size": found.tight}, recipe=recipe):
            return found
        return dataclasses.replace(found, tight=found.safe)

    def largest_of_loader(
        self, stage: StageSettings, sizes: Mapping[str, int], recipe: Recipe
    ) -> BatchBounds:
        """Return the same for training and, if it shares the loader, evaluation.

        Evaluation is asked whether it takes the batch of training, not how much it would take.
        """
        found = self.largest(stage, sizes, recipe=recipe)
        if found.tight is None or stage.eval_batch_size is not None:
            return found
        evaluation = evaluation_recipe(stage)
        if self.fits(stage, {**sizes, "batch_size": found.tight}, recipe=evaluation):
            return found
        return least([found, self.largest(stage, sizes, recipe=evaluation)])


def least(found: Iterable[BatchBounds]) -> BatchBounds:
    """Return the least of several; None if one takes nothing."""
    each = list(found)
    return BatchBounds(safe=_least(one.safe for one in each), tight=_least(one.tight for one in each))


def _least(numbers: Iterable[int | None]) -> int | None:
    given = list(numbers)
    known = [number for number in given if number is not None]
    return min(known) if len(known) == len(given) else None


def job_sizes(
    stage: StageSettings, forecast: Forecast, *, batch_size: int, over: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the sizes of a batch: the job's own, the stage's over them, `over` last."""
    own = forecast.of_stage(stage.name).sizes
    known = {name: setting.value for name, setting in stage.sizes.items() if name in own}
    return {**own, **known, **(over or {}), "batch_size": batch_size}


def evaluation_recipe(stage: StageSettings) -> Recipe:
    return dataclasses.replace(
        stage.recipe, accumulation=1, clip_norm=None, checkpointing=False, mode="evaluate"
    )


def describe_room(budget: Budget) -> str:
    """Say what a device offers."""
    return (
        f"{budget.device.name} has {show_bytes(budget.free_bytes.value)} free, "
        f"{show_bytes(budget.usable_bytes)} at a margin of {show_share(budget.margin)}"
    )


def leaning_notes(
    stages: Sequence[StageSettings], forecast: Forecast | None, budget: Budget | None
) -> tuple[str, ...]:
    """Return what the estimates of all stages rest on."""
    if forecast is None or budget is None:
        return ()
    of_stages = (note for stage in stages for note in forecast.of_stage(stage.name).notes)
    return tuple(dict.fromkeys((*of_stages, *notes_on_device(budget.device))))


def device_notes(stages: Sequence[StageSettings], budget: Budget) -> Iterator[str]:
    """Say what a config asks of the device that it does not have."""
    asking = {stage.precision.source for stage in stages if stage.precision.value in ("bf16", "pure-bf16")}
    if budget.device.bf16 is False:
        for source in sorted(asking):
            yield f"{source} asks for bfloat16, which {budget.device.name} does not have"
