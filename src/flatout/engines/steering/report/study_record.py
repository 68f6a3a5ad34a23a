"""What a study holds, as the record that reports are made from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.engines.steering.report.record import State, TrialRecord
from flatout.engines.steering.search.space import trial_of

if TYPE_CHECKING:
    import optuna

SCORE_NAMES = {
    "positive": "probability of the positive answer",
    "negative": "probability of the negative answer",
}
STATES: dict[str, State] = {
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
    "RUNNING": "running",
    "WAITING": "running",
}


def trial_records(study: optuna.Study) -> tuple[TrialRecord, ...]:
    """Every trial that got as far as a configuration; a pruned one has its mean over what it was asked."""
    records = []
    for one in study.get_trials(deepcopy=False):
        trial = trial_of(one.number, one.params)
        if trial is None:
            continue
        num_questions, score = _last_report(one)
        state = STATES[one.state.name]
        records.append(
            TrialRecord(
                number=trial.number,
                layer=trial.layer,
                method=trial.method,
                strength=trial.strength,
                where=trial.where,
                state=state,
                score=None if state == "failed" else score,
                num_questions=num_questions,
            )
        )
    return tuple(records)


def _last_report(one: optuna.trial.FrozenTrial) -> tuple[int | None, float | None]:
    reported: dict[int, Any] = one.intermediate_values
    if not reported:
        return None, one.values[0] if one.values else None
    step = max(reported)
    return step, float(reported[step])
