"""What fits on a device, asked in the same words by `show`, by `fit` and for what would help.

A step *fits* when it trains within the margin: if the memory ended there, PyTorch's allocator would at most
hand cached blocks back and ask again.  No allocator is capped at a margin, so a job that fits may hold more
than that, up to what is free, while nobody else wants it; what lies beyond the margin is head room for an
estimate that is too low.  A step is *safe* when the process never holds more than the margin.

The largest batch that fits is what a plan recommends.  Where the margin leaves hardly any head room and a
part of the estimate is a guess, only what is safe counts as fitting, and the plan says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flatout.memory.job import Recipe
from flatout.planner.budget import Budget
from flatout.planner.forecast import Forecast, LargestBatch, Peak
from flatout.planner.settings import StageSettings
from flatout.units import show_share

SURE_MARGIN = 0.9  # up to this one, the head room is a tenth of what is free, and stands in for a guess


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """What fits into the margin of a device."""

    budget: Budget
    forecast: Forecast

    def caution(self, stage: StageSettings) -> str | None:
        """Why only what is safe counts as fitting; None where it does not."""
        doubts = self.forecast.of_stage(stage.name).doubts
        if self.budget.margin <= SURE_MARGIN or not doubts:
            return None
        spared = show_share(1 - self.budget.margin)
        return f"a margin of {show_share(self.budget.margin)} spares {spared}, and {doubts[0]}"

    def peak(self, stage: StageSettings, sizes: Mapping[str, int], *, recipe: Recipe) -> Peak:
        """What a step holds where nothing stops it."""
        return self.forecast.of_stage(stage.name).peak_bytes(sizes, recipe=recipe)

    def held(self, peak: Peak) -> Peak:
        """What a step that fits holds: where it would be more than is free, memory is handed back there."""
        over = max(0, peak.process_bytes - self.budget.free_bytes.value)
        return dataclasses.replace(
            peak, reserved_bytes=peak.reserved_bytes - over, process_bytes=peak.process_bytes - over
        )

    def fits(
        self,
        stage: StageSettings,
        sizes: Mapping[str, int],
        *,
        recipe: Recipe,
        capacity_bytes: int | None = None,
    ) -> bool:
        """Whether a step trains within the margin, or within another capacity."""
        capacity = self.budget.usable_bytes if capacity_bytes is None else capacity_bytes
        trains = self.forecast.of_stage(stage.name).trains(sizes, recipe=recipe, capacity_bytes=capacity)
        if not trains or self.caution(stage) is None:
            return trains
        return self.peak(stage, sizes, recipe=recipe).process_bytes <= capacity

    def largest(self, stage: StageSettings, sizes: Mapping[str, int], *, recipe: Recipe) -> LargestBatch:
        """The largest batches within the margin, of which `tight` is recommended."""
        found = self.forecast.of_stage(stage.name).largest_batch(
            sizes, recipe=recipe, capacity_bytes=self.budget.usable_bytes
        )
        return found if self.caution(stage) is None else dataclasses.replace(found, tight=found.safe)

    def largest_of_loader(
        self, stage: StageSettings, sizes: Mapping[str, int], *, recipe: Recipe
    ) -> LargestBatch:
        """The same for training and, where it goes through the same loader, evaluation.

        Evaluation is asked whether it takes the batch of training, not how much it would take.
        """
        found = self.largest(stage, sizes, recipe=recipe)
        if found.tight is None or stage.eval_batch_size is not None:
            return found
        evaluation = evaluation_recipe(stage)
        if self.fits(stage, {**sizes, "batch_size": found.tight}, recipe=evaluation):
            return found
        return least([found, self.largest(stage, sizes, recipe=evaluation)])


def least(found: Iterable[LargestBatch]) -> LargestBatch:
    """What the worst of several takes; None where one takes nothing."""
    each = list(found)
    return LargestBatch(safe=_least(one.safe for one in each), tight=_least(one.tight for one in each))


def _least(numbers: Iterable[int | None]) -> int | None:
    given = list(numbers)
    known = [number for number in given if number is not None]
    return min(known) if len(known) == len(given) else None


def job_sizes(
    stage: StageSettings, forecast: Forecast, *, batch_size: int, over: Mapping[str, int] | None = None
) -> dict[str, int]:
    """The sizes of a batch: the job's own, the stage's over them, `over` last."""
    own = forecast.of_stage(stage.name).sizes
    known = {name: setting.value for name, setting in stage.sizes.items() if name in own}
    return {**own, **known, **(over or {}), "batch_size": batch_size}


def evaluation_recipe(stage: StageSettings) -> Recipe:
    return dataclasses.replace(
        stage.recipe, accumulation=1, clip_norm=None, checkpointing=False, mode="evaluate"
    )
