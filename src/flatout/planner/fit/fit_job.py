"""The largest batch of a job given as Python objects, with its estimate: `flatout.fit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flatout.ground import OnProgress, ignore
from flatout.ground.codec import encode
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.predict.estimate import MemoryEstimate
from flatout.memory.predict.forecast import Forecaster, limit_accumulation
from flatout.planner.config.settings import Setting, StageSettings
from flatout.planner.fit.fits import Budget, Judge, describe_room
from flatout.planner.fit.remedies import does_not_fit


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFit:
    """The largest batch of a job that fits a device.

    `batch_size` trains within the margin, though PyTorch's allocator may have to release cached memory;
    up to `safe_batch_size` the process never holds more than the margin (None: not even at 1).
    """

    batch_size: int
    safe_batch_size: int | None
    estimate: MemoryEstimate  # at `batch_size`
    budget: Budget
    caution: str | None = None  # why the margin is not used up

    def to_json(self) -> dict[str, Any]:
        document = {"format": "flatout-job-fit", "version": 1, **encode(self)}
        return {**document, "estimate": self.estimate.to_json(), "usable_bytes": self.budget.usable_bytes}

    def __str__(self) -> str:
        budget = self.budget
        lines = [f"batch {self.batch_size} fits: {describe_room(budget)}"]
        if self.safe_batch_size != self.batch_size:
            lines.append(f"up to {self.safe_batch_size or 'n/a'} it never holds more than the margin")
        if self.caution is not None:
            lines.append(f"the margin is not fully used: {self.caution}")
        return "\n".join([*lines, "", str(self.estimate)])


def fit_job(
    job: Job,
    recipe: Recipe,
    *,
    budget: Budget,
    native: bool = False,
    on_progress: OnProgress = ignore,
) -> JobFit:
    """Find the largest batch within the budget; raise BatchDoesNotFit with what would help."""
    forecast = Forecaster(job, device=budget.device, native=native, on_progress=on_progress)
    judge = Judge(budget=budget, forecast=forecast)
    stage = _stage(job, recipe)
    found = judge.largest(stage, job.sizes, recipe=limit_accumulation(recipe))
    if found.tight is None:
        raise does_not_fit([stage], judge=judge)
    sizes = {**job.sizes, "batch_size": found.tight}
    return JobFit(
        batch_size=found.tight,
        safe_batch_size=found.safe,
        estimate=forecast.estimate(limit_accumulation(recipe), sizes=sizes),
        budget=budget,
        caution=judge.caution(stage),
    )


def _stage(job: Job, recipe: Recipe) -> StageSettings:
    """Return the job as a stage of a config that says nothing of evaluation."""
    source = "given by the caller"
    return StageSettings(
        name=job.name,
        batch_size=Setting(value=job.sizes["batch_size"], source=source),
        accumulation=Setting(value=recipe.accumulation, source=source),
        precision=Setting(value=recipe.precision, source=source),
        checkpointing=Setting(value=recipe.checkpointing, source=source),
        clip_norm=Setting(value=recipe.clip_norm, source=source),
        eval_batch_size=Setting(value=1, source=source),
    )
