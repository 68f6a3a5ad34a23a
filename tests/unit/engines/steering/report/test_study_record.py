"""Optuna's trials as records: a pruned one has a mean over few questions, a failed one none."""

from __future__ import annotations

import optuna

from flatout.engines.steering.report.study_record import SCORE_NAMES, STATES, trial_records

OTHERS = {"method": "pca", "where": "all"}


def made(state: optuna.trial.TrialState, *, values: dict[int, float], score: float | None = None) -> object:
    distributions = {
        "layer": optuna.distributions.IntDistribution(0, 9),
        "strength": optuna.distributions.FloatDistribution(-1, 1),
        "method": optuna.distributions.CategoricalDistribution(["pca"]),
        "where": optuna.distributions.CategoricalDistribution(["all"]),
    }
    return optuna.trial.create_trial(
        state=state,
        value=score,
        params={"layer": 3, "strength": 0.5, **OTHERS},
        distributions=distributions,
        intermediate_values=values,
    )


def test_every_state_is_told_apart() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    states = optuna.trial.TrialState
    study = optuna.create_study(direction="maximize")
    study.add_trial(made(states.COMPLETE, values={4: 0.2, 16: 0.6}, score=0.6))  # type: ignore[arg-type]
    study.add_trial(made(states.PRUNED, values={4: 0.1}))  # type: ignore[arg-type]
    study.add_trial(made(states.FAIL, values={4: 0.9}))  # type: ignore[arg-type]
    study.add_trial(made(states.RUNNING, values={}))  # type: ignore[arg-type]
    study.add_trial(optuna.trial.create_trial(state=states.FAIL))  # killed before it had a configuration
    records = trial_records(study)
    assert [(one.state, one.score, one.num_questions) for one in records] == [
        ("complete", 0.6, 16),
        ("pruned", 0.1, 4),
        ("failed", None, 4),
        ("running", None, None),
    ]
    assert (records[0].layer, records[0].strength, records[0].method) == (3, 0.5, "pca")


def test_every_state_of_optuna_has_a_name() -> None:
    assert set(STATES) == {state.name for state in optuna.trial.TrialState}
    assert set(SCORE_NAMES) == {"positive", "negative"}
