"""The batch of evaluation, which keeps no activations for a backward pass and so has a size of its own.

It is changed only where it does not fit, or where that is allowed: some metrics depend on it.  Evaluation
through the loader of training has no size to change; the search for the batch of training minds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flatout.planner.config.settings import StageSettings
from flatout.planner.fit.fits import Judge, evaluation_recipe, job_sizes, least
from flatout.planner.fit.suggestions import EvaluationFit
from flatout.planner.forecast.questions import Peak


def fit_evaluation(
    stages: Sequence[StageSettings],
    *,
    judge: Judge,
    training_batch: int,
    may_raise: bool = False,
    lowered: Mapping[str, Mapping[str, int]] | None = None,
) -> EvaluationFit:
    """The evaluation of stages that share a batch size; `lowered` are sizes by stage that a plan changed."""

    def sizes(stage: StageSettings, batch_size: int) -> dict[str, int]:
        over = (lowered or {}).get(stage.name)
        return job_sizes(stage, judge.forecast, batch_size=batch_size, over=over)

    def peak(batch_size: int) -> Peak:
        found = (
            judge.peak(stage, sizes(stage, batch_size), recipe=evaluation_recipe(stage)) for stage in stages
        )
        return judge.held(max(found, key=lambda one: one.process_bytes))

    if any(stage.eval_batch_size is None for stage in stages):
        return EvaluationFit(
            batch_size=training_batch,
            largest=None,
            suggested=None,
            peak=peak(training_batch),
            reason="it has no size of its own and uses the batch of training",
        )
    configured = max(stage.eval_batch for stage in stages)
    largest = least(
        judge.largest(stage, sizes(stage, 1), recipe=evaluation_recipe(stage)) for stage in stages
    ).tight
    suggested, reason = None, "kept: some metrics depend on it (--allow eval_batch_size raises it)"
    if largest is None:
        reason = "not even a batch of 1 fits"
    elif configured > largest:
        suggested, reason = largest, "the configured size does not fit"
    elif may_raise and largest > configured:
        suggested, reason = largest, "raised, as allowed on the command line"
    return EvaluationFit(
        batch_size=configured,
        largest=largest,
        suggested=suggested,
        peak=peak(suggested or configured),
        reason=reason,
    )
