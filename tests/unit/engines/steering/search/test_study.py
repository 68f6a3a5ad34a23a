from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import optuna
import pytest

from flatout.engines.steering.search.finished_rows import FinishedRow, RowLog
from flatout.engines.steering.search.space import Space
from flatout.engines.steering.search.study import GRID_STRENGTHS, STATES, SearchStudy, open_study
from flatout.ground.errors import BadInput

SPACE = Space(layers=(0, 1, 2, 3), methods=("lda", "pca"), strength=(0.0, 1.0), where=("all", "generated"))
State = optuna.trial.TrialState


def opened(folder: Path, **changes: object) -> SearchStudy:
    return open_study(folder / "study.journal", rows=folder / "rows", **changes)  # type: ignore[arg-type]


def states(study: SearchStudy) -> list[optuna.trial.TrialState]:
    return [one.state for one in study.study.get_trials()]


def test_trials_of_a_bracket_differ_and_a_seed_gives_them_again(tmp_path: Path) -> None:
    asked = [opened(tmp_path / name, seed=4).ask(SPACE, 18) for name in ("a", "b")]
    assert asked[0] == asked[1]
    assert len({(one.layer, one.method, one.strength, one.where) for one in asked[0]}) == 18
    assert [one.number for one in asked[0]] == list(range(18))
    assert opened(tmp_path / "c", seed=5).ask(SPACE, 18) != asked[0]


def test_a_restarted_search_does_not_draw_its_first_bracket_again(tmp_path: Path) -> None:
    first = opened(tmp_path).ask(SPACE, 8)
    second = opened(tmp_path).ask(SPACE, 8)
    third = opened(tmp_path, worker="other").ask(SPACE, 8)
    assert len({one.strength for one in (*first, *second, *third)}) == 24


def test_a_sampler_learns_from_what_it_is_told(tmp_path: Path) -> None:
    in_memory = optuna.create_study(direction="maximize")
    study = SearchStudy(in_memory, RowLog(tmp_path), seed=0, worker="0")
    means = []
    for _ in range(6):
        asked = study.ask(SPACE, 12)
        values = [1.0 - abs(one.strength - 0.8) - 0.3 * abs(one.layer - 2) for one in asked]
        means.append(sum(values) / len(values))
        for one, value in zip(asked, values, strict=True):
            study.complete(one.number, value)
    assert means[-1] > means[0] + 0.2


@pytest.mark.parametrize("sampler", ["random", "grid", "cmaes"])
def test_every_sampler_proposes_and_is_told(tmp_path: Path, sampler: Any) -> None:
    if sampler == "cmaes":
        pytest.importorskip("cmaes")
    study = opened(tmp_path, sampler=sampler)
    for _ in range(3):
        asked = study.ask(SPACE, 8)
        for one in asked:
            study.complete(one.number, one.strength)
    values = [one.strength for one in opened(tmp_path).records()]
    assert len(values) == 24
    assert (len(set(values)) <= GRID_STRENGTHS) == (sampler == "grid")


def test_a_grid_ends_with_its_last_point_over_all_workers(tmp_path: Path) -> None:
    space = Space(layers=(0, 1), methods=("pca",), strength=(0.0, 1.0))
    found = []
    for worker in ("0", "1"):
        study = opened(tmp_path, sampler="grid", worker=worker)
        assert study.most_trials(space) == 2 * GRID_STRENGTHS
        for one in study.ask(space, GRID_STRENGTHS):
            found.append((one.layer, one.strength))
            study.complete(one.number, 0.5)
    assert len(set(found)) == 2 * GRID_STRENGTHS
    assert opened(tmp_path).most_trials(space) == math.inf


def test_a_missing_package_of_a_sampler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install cmaes"):
        opened(tmp_path, sampler="cmaes").ask(SPACE, 1)


def test_every_end_of_a_trial_is_its_own_state(tmp_path: Path) -> None:
    study = opened(tmp_path)
    for number in (0, 1):
        study.ask(SPACE, 1)
        study.report(number, value=0.25, num_questions=4)
        study.report(number, value=0.75, num_questions=4)  # a replay says it again: the first stands
    study.ask(SPACE, 2)
    study.complete(0, 0.5)
    study.prune(1)
    study.fail(2, "no finite value")
    for again in (study, opened(tmp_path)):
        trials = again.study.get_trials()
        assert states(again) == [State.COMPLETE, State.PRUNED, State.FAIL, State.RUNNING]
        assert [one.value for one in trials] == [0.5, 0.25, None, None], (
            "pruned keeps its mean; failed has none"
        )
        assert trials[1].intermediate_values == {4: 0.25}
        assert trials[2].user_attrs["reason"] == "no finite value"
        assert again.counts() == {"complete": 1, "pruned": 1, "failed": 1, "running": 1}
        best = again.best()
        assert best is not None and (best[0].number, best[1]) == (0, 0.5)


@pytest.mark.parametrize("end", ["complete", "prune", "fail"])
def test_what_has_ended_never_changes(tmp_path: Path, end: str) -> None:
    study = opened(tmp_path)
    study.ask(SPACE, 1)
    tell = {
        "complete": lambda: study.complete(0, 0.5),
        "prune": lambda: study.prune(0),
        "fail": lambda: study.fail(0, "first"),
    }
    tell[end]()
    before = study.study.get_trials()[0]
    for other in tell.values():
        other()
    study.report(0, value=1.0, num_questions=9)
    assert study.study.get_trials()[0] == before


def test_open_brackets_are_whole_and_mine(tmp_path: Path) -> None:
    study = opened(tmp_path)
    done, half = study.ask(SPACE, 2), study.ask(SPACE, 3)
    for one in done:
        study.complete(one.number, 0.0)
    study.prune(half[0].number)
    others = opened(tmp_path, worker="other")
    assert others.open_brackets() == []
    mine = others.ask(SPACE, 1)
    assert others.open_brackets() == [mine]
    assert opened(tmp_path).open_brackets() == [half]
    assert opened(tmp_path).open_workers() == {"other"} and others.open_workers() == {"0"}
    assert opened(tmp_path).num_asked() == 6


def test_a_trial_without_a_configuration_is_failed(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.study.ask()
    assert opened(tmp_path, worker="other").open_brackets() == []
    assert states(study) == [State.RUNNING], "its worker may be about to choose"
    study.fail_ownerless()
    assert study.open_brackets() == [] and study.num_asked() == 0
    study.study.ask().set_user_attr("worker", "0")  # killed before it chose
    assert study.open_brackets() == []
    assert states(study) == [State.FAIL, State.FAIL]


def test_a_study_is_about_one_thing(tmp_path: Path) -> None:
    opened(tmp_path).bind({"model": "a", "set of questions": "b"})
    opened(tmp_path).bind({"model": "a", "set of questions": "b"})
    with pytest.raises(
        BadInput, match=r"'steering' was started with another set of questions .*another name"
    ):
        opened(tmp_path).bind({"model": "a", "set of questions": "c"})


def test_a_study_without_an_answered_row_may_get_another_judge(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.bind({"score": "a judge that raises"})
    study.ask(SPACE, 2)
    opened(tmp_path).bind({"score": "the mended judge"})
    with pytest.raises(BadInput, match="started with another score: 'the mended judge'"):
        opened(tmp_path, worker="other").bind({"score": "a third one"})
    study.rows.add(FinishedRow(trial=0, question="q", value=1.0))
    with pytest.raises(BadInput, match="started with another score: 'the mended judge'"):
        opened(tmp_path).bind({"score": "a third one"})


@pytest.mark.parametrize("cut", [1, 15])
def test_a_torn_journal_is_healed(tmp_path: Path, cut: int) -> None:
    study = opened(tmp_path)
    study.ask(SPACE, 2)
    path = tmp_path / "study.journal"
    path.write_bytes(path.read_bytes()[:-cut])
    again = opened(tmp_path)
    assert len(again.ask(SPACE, 2)) == 2
    assert len(opened(tmp_path).study.get_trials()) == 4
    for line in path.read_text().splitlines():
        json.loads(line)


OTHERS = {"method": "pca", "where": "all", "mode": "add", "span": 1}


def made(state: optuna.trial.TrialState, *, values: dict[int, float], score: float | None = None) -> object:
    distributions = {
        "layer": optuna.distributions.IntDistribution(0, 9),
        "strength": optuna.distributions.FloatDistribution(-1, 1),
        "method": optuna.distributions.CategoricalDistribution(["pca"]),
        "where": optuna.distributions.CategoricalDistribution(["all"]),
        "mode": optuna.distributions.CategoricalDistribution(["add"]),
        "span": optuna.distributions.CategoricalDistribution([1]),
    }
    return optuna.trial.create_trial(
        state=state,
        value=score,
        params={"layer": 3, "strength": 0.5, **OTHERS},
        distributions=distributions,
        intermediate_values=values,
    )


def test_every_state_is_told_apart(tmp_path: Path) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    states = optuna.trial.TrialState
    study = optuna.create_study(direction="maximize")
    study.add_trial(made(states.COMPLETE, values={4: 0.2, 16: 0.6}, score=0.6))  # type: ignore[arg-type]
    study.add_trial(made(states.PRUNED, values={4: 0.1}))  # type: ignore[arg-type]
    study.add_trial(made(states.FAIL, values={4: 0.9}))  # type: ignore[arg-type]
    study.add_trial(made(states.RUNNING, values={}))  # type: ignore[arg-type]
    study.add_trial(optuna.trial.create_trial(state=states.FAIL))  # killed before it had a configuration
    records = SearchStudy(study, RowLog(tmp_path), seed=0, worker="0").records()
    assert [(one.state, one.score, one.num_questions) for one in records] == [
        ("complete", 0.6, 16),
        ("pruned", 0.1, 4),
        ("failed", None, 4),
        ("running", None, None),
    ]
    assert (records[0].layer, records[0].strength, records[0].method) == (3, 0.5, "pca")


def test_every_state_of_optuna_has_a_name() -> None:
    assert set(STATES) == {state.name for state in optuna.trial.TrialState}
