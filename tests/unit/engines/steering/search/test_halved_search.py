from __future__ import annotations

import functools
import hashlib
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest

from flatout.engines.steering.report.record import Trial
from flatout.engines.steering.search.finished_rows import RowLog
from flatout.engines.steering.search.halved_search import Event, HalvedSearch
from flatout.engines.steering.search.halving import Halving
from flatout.engines.steering.search.space import Space
from flatout.engines.steering.search.test_winner import encode_neutral, measure_harm, retest_trial
from flatout.engines.steering.trials.packed_trials import PackedTrials
from flatout.engines.steering.trials.scoring import Judged, MultipleChoice, OnScore, Score, TrialRow
from flatout.engines.steering.trials.trial_engine import TrialEngine
from flatout.ground.errors import BadInput
from tests.support.multiplex import prompts_of
from tests.support.steering import PLANTED, model, questions, study_in, tokenizer, vectors, words
from tests.support.warm_python import warm

NUM_QUESTIONS, TRIALS = 16, 12


class Computed:
    """A scorer whose values are a function of amount, layer and question; it stops after `limit` rows."""

    def __init__(self, *, limit: int | None = None, failing: float | None = None) -> None:
        self.limit, self.failing = limit, failing
        self.rows: list[tuple[int | None, str]] = []

    refusal = "it is broken"

    def recipe(self) -> Mapping[str, str]:
        return {"score": "computed"}

    def score(self, engine: TrialEngine, rows: Sequence[TrialRow], *, on_score: OnScore) -> None:
        for number, (steering, question) in enumerate(rows):
            if self.limit is not None and len(self.rows) >= self.limit:
                raise KeyboardInterrupt
            amount, layer = (0.0, 0) if steering is None else (steering.amount, steering.layer)
            digest = hashlib.sha256(f"{amount:.9f}{layer}{question.key}".encode()).digest()
            value = amount / 100 + layer / 10 + digest[0] / 2560
            self.rows.append((None if steering is None else round(amount * 1e9) * 10 + layer, question.key))
            broken = self.failing is not None and steering is not None and amount > self.failing
            on_score(number, Score(value=None if broken else value))


@functools.cache
def engine() -> PackedTrials:
    return PackedTrials(model(), slots=4)


def searching(
    folder: Path, scorer: Computed, *, heard: list[Event] | None = None, **changes: Any
) -> HalvedSearch:
    return HalvedSearch(
        engine(),
        vectors(),
        questions(NUM_QUESTIONS),
        study=study_in(folder, **changes),
        scorer=scorer,
        on_event=None if heard is None else heard.append,
    )


def outcome(folder: Path) -> list[tuple[Any, ...]]:
    """All that a study knows of its trials."""
    trials = study_in(folder).study.get_trials()
    return [(one.number, one.params, one.state.name, one.value, one.intermediate_values) for one in trials]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[Any, ...]], int]:
    """What an uninterrupted search comes to, and the rows it takes."""
    folder, scorer = tmp_path_factory.mktemp("whole"), Computed()
    searching(folder, scorer).run(trials=TRIALS, batch_trials=6)
    return outcome(folder), len(scorer.rows)


def test_poor_trials_end_early_and_say_so(tmp_path: Path) -> None:
    heard: list[Event] = []
    work = searching(tmp_path, Computed(), heard=heard)
    work.run(trials=TRIALS, batch_trials=6)
    assert work.study.counts() == {"complete": 2, "pruned": 10, "failed": 0, "running": 0}
    cost_share = work.cost_share()
    assert cost_share is not None and cost_share < 0.4
    trials = study_in(tmp_path).study.get_trials()
    for one in trials:
        assert one.value is not None and one.value != 0.0
        assert one.value == one.intermediate_values[max(one.intermediate_values)]
    best = max((one for one in trials if one.state.name == "COMPLETE"), key=lambda one: one.value or 0)
    found = work.study.best()
    assert found is not None and (found[0].number, found[1]) == (best.number, best.value)
    kinds = Counter(event.kind for event in heard)
    assert (kinds["started"], kinds["pruned"], kinds["complete"]) == (12, 10, 2)
    assert kinds["rung"] > 0
    assert kinds["row"] == sum(max(one.intermediate_values) for one in trials)
    first_end = next(index for index, event in enumerate(heard) if event.kind == "pruned")
    assert sum(event.kind == "row" for event in heard[:first_end]) == 12, (
        "6 trials, an eighth of 16 questions"
    )


@pytest.mark.parametrize("limit", [0, 13, 30, 55])
def test_an_interrupted_search_goes_on_where_it_was(
    tmp_path: Path, limit: int, whole: tuple[list[tuple[Any, ...]], int]
) -> None:
    expected, num_rows = whole
    stopped, resumed = Computed(limit=limit), Computed()
    with pytest.raises(KeyboardInterrupt):
        searching(tmp_path / "cut", stopped).run(trials=TRIALS, batch_trials=6)
    assert any(state == "RUNNING" for _, _, state, _, _ in outcome(tmp_path / "cut"))
    heard: list[Event] = []
    searching(tmp_path / "cut", resumed, heard=heard).run(trials=TRIALS, batch_trials=6)
    assert outcome(tmp_path / "cut") == expected
    assert len(stopped.rows) == limit and len(resumed.rows) == num_rows - limit
    assert not set(stopped.rows) & set(resumed.rows), "a finished row is never run again"
    assert any(event.kind == "resumed" for event in heard)


def test_a_trial_that_gives_no_number_fails_and_the_others_go_on(tmp_path: Path) -> None:
    amounts = [vectors()["random"].norms[layer].item() for layer in range(4)]
    heard: list[Event] = []
    work = searching(tmp_path, Computed(failing=max(amounts) * 0.2), heard=heard)
    work.run(trials=TRIALS, batch_trials=6)
    trials = study_in(tmp_path).study.get_trials()
    failed = [one for one in trials if one.state == optuna.trial.TrialState.FAIL]
    assert failed and len(failed) < len(trials)
    assert all(one.value is None and "finite" in one.user_attrs["reason"] for one in failed)
    assert sum(event.kind == "failed" for event in heard) == len(failed)
    assert not any(one.state == optuna.trial.TrialState.RUNNING for one in trials)


def test_when_every_trial_fails_there_is_no_winner(tmp_path: Path) -> None:
    work = searching(tmp_path, Computed(failing=-1.0))
    work.run(trials=3)
    assert work.study.best() is None and work.study.counts()["failed"] == 3
    with pytest.raises(BadInput, match="all 3 trials failed: it is broken"):
        work.refuse_all_failed()
    assert work.values(None, work.questions) is not None


def test_a_study_may_grow_and_may_be_shared(tmp_path: Path) -> None:
    searching(tmp_path, Computed()).run(trials=4)
    searching(tmp_path, Computed(), worker="b").run(trials=7, batch_trials=2)
    assert [state for _, _, state, _, _ in outcome(tmp_path)].count("RUNNING") == 0
    assert len(outcome(tmp_path)) == 7
    scorer = Computed()
    searching(tmp_path, scorer, worker="b").run(trials=7)
    assert scorer.rows == []


def test_a_killed_driver_loses_no_finished_row(
    tmp_path: Path, whole: tuple[list[tuple[Any, ...]], int]
) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from tests.unit.engines.steering.search import test_halved_search as own\n"
        "class Killed(own.Computed):\n"
        "    def score(self, engine, rows, *, on_score):\n"
        "        try: super().score(engine, rows, on_score=on_score)\n"
        "        except KeyboardInterrupt: os.kill(os.getpid(), signal.SIGKILL)\n"
        "own.searching(Path(sys.argv[1]), Killed(limit=17)).run(trials=own.TRIALS, batch_trials=6)\n"
    )
    root = Path(__file__).resolve().parents[4]
    done = warm().run("python", "-c", code, tmp_path / "cut", root)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(RowLog(tmp_path / "cut" / "rows")) == 17
    resumed = Computed()
    searching(tmp_path / "cut", resumed).run(trials=TRIALS, batch_trials=6)
    assert outcome(tmp_path / "cut") == whole[0]
    assert len(resumed.rows) == whole[1] - 17


def test_a_planted_direction_is_recovered(tmp_path: Path) -> None:
    asked = questions(32)
    work = HalvedSearch(
        PackedTrials(model(), slots=256),
        vectors(),
        asked[:16],
        study=study_in(tmp_path),
        scorer=MultipleChoice(tokenizer()),
        space=Space.of(vectors(), strength=(0.0, 1.0)),
    )
    work.run(trials=32, batch_trials=16)
    best, cost_share = work.study.best(), work.cost_share()
    assert best is not None and (best[0].layer, best[0].method) == (PLANTED, "planted")
    assert cost_share is not None and cost_share <= 0.32
    found = retest_trial(work, best[0], asked[16:])
    assert found is not None and found.num_questions == 16
    assert found.is_certain and found.difference.low is not None and found.difference.low > 0.3
    neutral = encode_neutral([words(text) for text in prompts_of([20, 30, 25])], tokenizer())
    harm = measure_harm(PackedTrials(model()), best[0], vectors(), neutral)
    assert harm is not None and harm.value > 1.0


def test_texts_are_generated_judged_and_kept(tmp_path: Path) -> None:
    scorer = Judged(
        tokenizer(), lambda question, text: float(len(set(text.split()))), name="words", max_new_tokens=4
    )
    study = study_in(tmp_path)
    work = HalvedSearch(
        PackedTrials(model(), slots=4, max_tokens=40),
        vectors(),
        questions(4),
        study=study,
        scorer=scorer,
        halving=Halving(rungs=1),
    )
    work.run(trials=3)
    assert study.counts()["complete"] == 3 and work.cost_share() == 1.0
    kept = study.rows.find(0, questions(1)[0].key)
    assert kept is not None and kept.text is not None and len(kept.text.split()) == 4


def test_a_study_belongs_to_its_questions_and_halving(tmp_path: Path) -> None:
    def bind(asked: int, **changes: Any) -> None:
        study = study_in(tmp_path)
        work = HalvedSearch(engine(), vectors(), questions(asked), study=study, scorer=Computed(), **changes)
        study.bind(work.recipe())

    bind(4)
    with pytest.raises(BadInput, match="another set of questions"):
        bind(5)
    with pytest.raises(BadInput, match="another halving"):
        bind(4, halving=Halving(rungs=1))


def test_what_cannot_be_searched_is_named(tmp_path: Path) -> None:
    work = searching(tmp_path, Computed())
    with pytest.raises(BadInput, match="trials=0"):
        work.run(trials=0)
    with pytest.raises(BadInput, match="a fresh question was already asked in the search"):
        retest_trial(work, Trial(number=0, layer=0, method="random", strength=0.1, where="all"), questions(1))
    with pytest.raises(BadInput, match="has no questions"):
        HalvedSearch(engine(), vectors(), [], study=study_in(tmp_path), scorer=Computed())
