"""What would make a job fit that does not fit at a batch of one.

Checkpointing and bf16 are estimated like everything else; LoRA is another model, so it is named and not
estimated; the GPU is looked up in the datasheets.  A size of the objective, such as the number of negatives,
is lowered only where the user allowed it, and only as far as it must be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import product

from flatout.ground.errors import BadInput, BatchDoesNotFit
from flatout.ground.units import show_bytes
from flatout.hardware.matching import all_datasheets
from flatout.memory.jobs.job import Recipe
from flatout.memory.predict.forecast import limit_accumulation
from flatout.planner.config.settings import StageSettings
from flatout.planner.fit.fits import Forecast, Judge, describe_room, evaluation_recipe, job_sizes


def does_not_fit(stages: Sequence[StageSettings], *, judge: Judge) -> BatchDoesNotFit:
    """Return the error for a group of stages, with what would help as its hint."""
    needs = {stage.name: needed_bytes(stage, stage.recipe, forecast=judge.forecast) for stage in stages}
    worst = max(stages, key=lambda stage: needs[stage.name])
    needed = needs[worst.name]
    stage_words = f" in {worst.name}" if len(stages) > 1 else ""
    helps = [*_lighter(worst, judge=judge), *_others(needed, worst, margin=judge.budget.margin)]
    return BatchDoesNotFit(
        f"batch_size=1 needs {show_bytes(needed)}{stage_words}; {describe_room(judge.budget)}",
        hint=f"what would help: {'; '.join(helps)}",
    )


def needed_bytes(
    stage: StageSettings, recipe: Recipe, *, forecast: Forecast, over: Mapping[str, int] | None = None
) -> int:
    """Return what a batch of one needs, in training and, if it shares the loader, in evaluation."""
    sizes = job_sizes(stage, forecast, batch_size=1, over=over)
    of_stage = forecast.of_stage(stage.name)
    return max(of_stage.peak_bytes(sizes, recipe=one).process_bytes for one in _recipes(stage, recipe))


def _fits(
    stage: StageSettings, recipe: Recipe, *, judge: Judge, over: Mapping[str, int] | None = None
) -> bool:
    """Return whether a batch of one trains within the margin."""
    sizes = job_sizes(stage, judge.forecast, batch_size=1, over=over)
    return all(judge.fits(stage, sizes, one) for one in _recipes(stage, recipe))


def _recipes(stage: StageSettings, recipe: Recipe) -> list[Recipe]:
    evaluation = [] if stage.eval_batch_size is not None else [evaluation_recipe(stage)]
    return [limit_accumulation(recipe), *evaluation]


def _lighter(stage: StageSettings, *, judge: Judge) -> list[str]:
    """Name the recipes that fit: checkpointing, bf16, or both if neither alone does."""
    recipe = stage.recipe
    checkpoints = (False,) if recipe.checkpointing else (False, True)
    can_cast = recipe.precision in ("fp32", "tf32") and judge.budget.device.bf16 is not False
    casts = (False, True) if can_cast else (False,)
    fitting: list[tuple[bool, bool, int]] = []
    for checkpointing, cast in sorted(product(checkpoints, casts), key=sum):
        covered = any(checkpointing >= one and cast >= other for one, other, _ in fitting)
        if covered or not (checkpointing or cast):
            continue
        lighter = dataclasses.replace(
            recipe,
            checkpointing=recipe.checkpointing or checkpointing,
            precision="bf16" if cast else recipe.precision,
        )
        try:
            needed = needed_bytes(stage, lighter, forecast=judge.forecast)
        except BadInput:  # the model has no switch for it
            continue
        if _fits(stage, lighter, judge=judge):
            fitting.append((checkpointing, cast, needed))
    return [
        f"{' and '.join(['checkpointing'] * checkpointing + ['bf16'] * cast)} ({show_bytes(needed)})"
        for checkpointing, cast, needed in fitting
    ]


def _others(needed: int, stage: StageSettings, *, margin: float) -> list[str]:
    gpu = smallest_gpu(needed, margin=margin, bf16=stage.precision.value in ("bf16", "pure-bf16"))
    found = f"a GPU from {gpu} on" if gpu else "no single GPU of the datasheets"
    return ["LoRA instead of training all weights (another model, not estimated here)", found]


def smallest_gpu(needed: int, *, margin: float, bf16: bool) -> str | None:
    """Return the smallest GPU on which so much fits, of the latest generation."""
    fitting = [
        row
        for row in all_datasheets()
        if row.vendor == "NVIDIA" and row.memory_bytes * margin >= needed and (row.bf16 or not bf16)
    ]
    if not fitting:
        return None
    least = min(row.memory_bytes for row in fitting)
    return [row.name for row in fitting if row.memory_bytes == least][-1]


def lower_sizes(
    stages: Sequence[StageSettings], *, judge: Judge, allow: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Map stage -> allowed size -> the largest value at which a batch of one fits; empty if none does."""
    names = [name for name in allow if name in judge.forecast.sizes and name != "batch_size"]
    lowered: dict[str, dict[str, int]] = {}
    for stage in stages:
        over = _lower_stage(stage, names, judge=judge)
        if over is None:
            return {}
        if over:
            lowered[stage.name] = over
    return lowered


def _lower_stage(stage: StageSettings, names: Sequence[str], *, judge: Judge) -> dict[str, int] | None:
    """Lower one size after the other to 1, then raise the last as far as it goes."""

    def fits(over: Mapping[str, int]) -> bool:
        return _fits(stage, stage.recipe, judge=judge, over=over)

    over: dict[str, int] = {}
    for name in names:
        if fits(over):
            break
        over[name] = 1
        low, high = 1, job_sizes(stage, judge.forecast, batch_size=1)[name]
        high = high if fits(over) else low
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits({**over, name: middle}) else (low, middle - 1)
        over[name] = low
    return over if fits(over) else None
