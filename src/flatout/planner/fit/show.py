"""What a config does to a device as it is: memory per stage, share of the device, verdict, advice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.ground.units import show_bytes
from flatout.memory.predict.forecast import BatchBounds, Peak, limit_accumulation
from flatout.planner.config.settings import Settings, StageSettings
from flatout.planner.fit.fits import (
    Budget,
    Forecast,
    Judge,
    describe_room,
    device_notes,
    evaluation_recipe,
    job_sizes,
    leaning_notes,
)
from flatout.planner.fit.progress import PEAK, SEARCH, Progress
from flatout.planner.fit.suggestions import largest_divisor

# "held back": the stage has room, and another that shares its batch size has not
FitVerdict = Literal["does not fit", "beyond the margin", "well used", "under-used", "held back", "unknown"]
UNDER_USED = 2  # a device that could take this many times the batch is under-used


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """One stage: what it takes in training and evaluation, and what would fit."""

    name: str
    settings: StageSettings
    effective_batch: int
    training: Peak | None = None
    evaluation: Peak | None = None
    largest: BatchBounds | None = None
    caution: str | None = None  # why the margin is not used up
    device_share: float | None = None  # of the device's total
    verdict: FitVerdict = "unknown"

    @property
    def process_bytes(self) -> int | None:
        """The worse of training and evaluation."""
        known = (peak.process_bytes for peak in (self.training, self.evaluation) if peak is not None)
        return max(known, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """A config, and what it does to a device."""

    settings: Settings
    budget: Budget | None
    stages: tuple[StageMemory, ...]
    recommendations: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what the estimates lean on

    @property
    def has_findings(self) -> bool:
        return any(stage.verdict not in ("well used", "held back", "unknown") for stage in self.stages)


def overview(
    settings: Settings,
    *,
    budget: Budget | None,
    forecast: Forecast | None,
    progress: Progress | None = None,
) -> Overview:
    """Estimate every stage as it is configured; what cannot be known without a model or device is None."""
    progress = progress or Progress()
    progress.expect(_expected_traces(settings.stages))
    found = []
    for stage in settings.stages:
        progress.ask(stage.name)
        found.append(_stage_memory(stage, ranks=settings.ranks.value, budget=budget, forecast=forecast))
    stages = tuple(found)
    stages = tuple(_held_back(stage, stages) for stage in stages)
    return Overview(
        settings=settings,
        budget=budget,
        stages=stages,
        recommendations=tuple(_recommendations(stages, budget=budget)),
        notes=leaning_notes(settings.stages, forecast, budget),
    )


def _expected_traces(stages: Sequence[StageSettings]) -> Iterator[int]:
    """Count the traces of every stage; one that trains like an earlier one takes none."""
    known = []
    for stage in stages:
        trained = (stage.recipe, stage.eval_batch, {name: size.value for name, size in stage.sizes.items()})
        shared = stage.eval_batch_size is None  # evaluation is asked at the largest batch too
        yield 0 if trained in known else SEARCH + PEAK + shared * PEAK
        known.append(trained)


def _stage_memory(
    stage: StageSettings, *, ranks: int, budget: Budget | None, forecast: Forecast | None
) -> StageMemory:
    batch_size = stage.batch_size.value
    seen = StageMemory(
        name=stage.name,
        settings=stage,
        effective_batch=batch_size * stage.accumulation.value * ranks,
    )
    if forecast is None:
        return seen
    recipe, evaluation = limit_accumulation(stage.recipe), evaluation_recipe(stage)
    sizes = job_sizes(stage, forecast, batch_size=batch_size)
    evaluated = {**sizes, "batch_size": stage.eval_batch}
    judge = None if budget is None else Judge(budget=budget, forecast=forecast)
    # The search first: the peak follows from its traces.
    largest = judge.largest_of_loader(stage, sizes, recipe=recipe) if judge else None
    of_stage = forecast.of_stage(stage.name)
    peaks = of_stage.peak_bytes(sizes, recipe=recipe), of_stage.peak_bytes(evaluated, recipe=evaluation)
    seen = dataclasses.replace(seen, training=peaks[0], evaluation=peaks[1])
    if budget is None or judge is None or largest is None:
        return seen
    asked = ((sizes, recipe), (evaluated, evaluation))
    within_free = all(judge.runs(stage, at, recipe=one) for at, one in asked)
    within_margin = within_free and all(judge.fits(stage, at, recipe=one) for at, one in asked)
    training, evaluated_peak = (judge.held(peak) if within_free else peak for peak in peaks)
    return dataclasses.replace(
        seen,
        training=training,
        evaluation=evaluated_peak,
        largest=largest,
        caution=judge.caution(stage),
        device_share=max(training.process_bytes, evaluated_peak.process_bytes) / budget.total_bytes,
        verdict=_verdict(
            within_free=within_free,
            within_margin=within_margin,
            under_used=(largest.tight or 0) >= UNDER_USED * batch_size,
        ),
    )


def _verdict(*, within_free: bool, within_margin: bool, under_used: bool) -> FitVerdict:
    if not within_free:
        return "does not fit"
    if not within_margin:
        return "beyond the margin"
    return "under-used" if under_used else "well used"


def _held_back(stage: StageMemory, stages: tuple[StageMemory, ...]) -> StageMemory:
    """Mark a stage that others hold back: a shared batch grows only as far as the worst stage lets it."""
    sharing = [other for other in stages if other.settings.batch_size == stage.settings.batch_size]
    if stage.verdict == "under-used" and any(other.verdict != "under-used" for other in sharing):
        return dataclasses.replace(stage, verdict="held back")
    return stage


def _recommendations(stages: tuple[StageMemory, ...], *, budget: Budget | None) -> list[str]:
    if budget is None or any(stage.verdict == "unknown" for stage in stages):
        return []
    said = [
        _too_much(stage, budget) for stage in stages if stage.verdict in ("does not fit", "beyond the margin")
    ]
    if not said:
        said += _larger_batch(stages)
    cautions = dict.fromkeys(stage.caution for stage in stages if stage.caution is not None)
    said += [f"the margin is not fully used: {why}" for why in cautions]
    return [*said, *device_notes([stage.settings for stage in stages], budget)]


def _too_much(stage: StageMemory, budget: Budget) -> str:
    """Say what needs more than there is, and what to do about it."""
    own_size, needed = stage.settings.eval_batch_size, stage.process_bytes
    if own_size is not None and stage.evaluation is not None and stage.evaluation.process_bytes == needed:
        return (
            f"evaluation of {stage.name} at batch {own_size.value} needs {show_bytes(needed)}; "
            f"{describe_room(budget)}: lower its batch (flatout plan fit)"
        )
    return (
        f"{stage.name} needs {show_bytes(needed)}; {describe_room(budget)}: lower the batch and raise "
        "accumulation (flatout plan fit)"
    )


def _larger_batch(stages: tuple[StageMemory, ...]) -> Iterator[str]:
    """Say how much larger a batch shared by all stages could be."""
    largest = [stage.largest.tight for stage in stages if stage.largest is not None]
    worst = min((number for number in largest if number is not None), default=None)
    configured = {stage.settings.batch_size.value for stage in stages}
    if worst is None or len(configured) > 1 or worst < UNDER_USED * max(configured):
        return
    batch_size = max(configured)
    common = math.gcd(*(batch_size * stage.settings.accumulation.value for stage in stages))
    fitting = largest_divisor(common, at_most=worst) or 1
    if fitting > batch_size:
        how = f"flatout plan fit raises it to {fitting} and lowers accumulation: the effective batch stays"
    elif common > batch_size:
        how = f"none from {batch_size + 1} on divides the effective batch (--effective asks for another)"
    else:
        how = "nothing is accumulated, so only a larger effective batch would use it (--effective)"
    yield f"a batch of {worst} fits {'in every stage' if len(stages) > 1 else 'here'}; {how}"
