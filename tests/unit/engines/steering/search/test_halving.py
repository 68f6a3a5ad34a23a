from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.steering.search.halving import Bracket, Halving
from flatout.ground.errors import BadInput


def climbed(values: list[list[float]], halving: Halving) -> tuple[Bracket, int]:
    """A bracket over a table of values, and the rows it took."""
    bracket = Bracket(range(len(values)), num_questions=len(values[0]), halving=halving)
    num_rows = 0
    while not bracket.is_over:
        rows = bracket.pending()
        assert rows, "a bracket that is not over wants rows"
        num_rows += len(rows)
        for trial, question in rows:
            bracket.answer(trial, question, values[trial][question])
        assert bracket.advance() is not None or bracket.is_over
    return bracket, num_rows


def test_the_questions_double_from_rung_to_rung() -> None:
    assert Halving().ladder(50) == (6, 12, 25, 50)
    assert Halving(rungs=3, factor=3).ladder(20) == (2, 6, 20)
    assert Halving().ladder(3) == (1, 3)
    assert Halving(rungs=1).ladder(7) == (7,)


@given(st.integers(1, 600), st.integers(1, 80), st.integers(1, 5), st.integers(2, 3))
def test_so_many_trials_fill_every_rung_and_one_fewer_does_not(
    num_rows: int, num_questions: int, rungs: int, factor: int
) -> None:
    halving = Halving(rungs=rungs, factor=factor)
    filling = halving.trials_that_fill(num_rows, num_questions=num_questions)
    ladder = (0, *halving.ladder(num_questions))
    asked = [end - start for start, end in itertools.pairwise(ladder)]

    def fewest(trials: int) -> float:
        return min(trials / factor**rung * count for rung, count in enumerate(asked))

    assert fewest(filling) >= num_rows > fewest(filling - 1)


def test_a_ladder_must_be_climbable() -> None:
    with pytest.raises(BadInput, match=r"rungs=0 or factor=2"):
        Halving(rungs=0)
    with pytest.raises(BadInput, match=r"factor=1"):
        Halving(factor=1)
    with pytest.raises(BadInput, match="has no questions"):
        Halving().ladder(0)
    with pytest.raises(BadInput, match="each once"):
        Bracket([1, 1], num_questions=2, halving=Halving())


def test_the_better_half_goes_on() -> None:
    bracket = Bracket([7, 8, 9, 10], num_questions=4, halving=Halving(rungs=2))
    assert bracket.pending() == [(trial, question) for question in (0, 1) for trial in (7, 8, 9, 10)]
    for trial, question in bracket.pending():
        bracket.answer(trial, question, {7: 0.1, 8: 0.9, 9: 0.4, 10: 0.4}[trial])
        if (trial, question) != (10, 1):
            assert bracket.advance() is None, "rows are missing"
    over = bracket.advance()
    assert over is not None
    assert (over.num_questions, over.kept, over.pruned, over.complete) == (2, (8, 9), (10, 7), ())
    assert [bracket.state(trial) for trial in (7, 8, 9, 10)] == ["pruned", "running", "running", "pruned"]
    assert {trial for trial, _ in bracket.pending()} == {8, 9}
    assert {question for _, question in bracket.pending()} == {2, 3}
    for trial, question in bracket.pending():
        bracket.answer(trial, question, 0.5)
    last = bracket.advance()
    assert last is not None and last.complete == (8, 9) and bracket.is_over
    assert bracket.mean(8) == pytest.approx(0.7)
    assert bracket.advance() is None


def test_a_value_that_is_no_number_fails_its_trial_alone() -> None:
    bracket = Bracket([0, 1], num_questions=2, halving=Halving(rungs=1))
    bracket.answer(0, 0, math.nan)
    bracket.answer(0, 1, 0.5)  # was on its way
    assert bracket.state(0) == "failed" and bracket.mean(0) is None
    assert bracket.pending() == [(1, 0), (1, 1)]
    for question in (0, 1):
        bracket.answer(1, question, 0.0)
    over = bracket.advance()
    assert over is not None and over.complete == (1,) and over.means == {1: 0.0}
    with pytest.raises(BadInput, match="trial 1 is complete"):
        bracket.fail(1)


def test_a_bracket_ends_when_every_trial_has_failed() -> None:
    bracket = Bracket([0, 1], num_questions=2, halving=Halving())
    for trial in (0, 1):
        bracket.fail(trial)
    assert bracket.is_over and bracket.advance() is None and bracket.pending() == []


@given(
    st.integers(1, 12),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(2, 3),
    st.randoms(use_true_random=False),
)
def test_every_trial_ends_once_and_the_kept_were_the_better(
    num_trials: int, num_questions: int, rungs: int, factor: int, drawn: random.Random
) -> None:
    halving = Halving(rungs=rungs, factor=factor)
    values = [
        [math.inf if drawn.random() < 0.02 else drawn.random() for _ in range(num_questions)]
        for _ in range(num_trials)
    ]
    bracket, num_rows = climbed(values, halving)
    states = [bracket.state(trial) for trial in range(num_trials)]
    assert set(states) <= {"complete", "pruned", "failed"}
    assert num_rows <= num_trials * num_questions
    for trial, state in enumerate(states):
        answered = bracket.num_answered(trial)
        mean = bracket.mean(trial)
        if state == "failed":
            assert mean is None
        else:
            assert mean == pytest.approx(math.fsum(values[trial][:answered]) / answered)
            assert answered in halving.ladder(num_questions)
            assert (answered == num_questions) or state == "pruned"
    if "failed" not in states:
        assert "complete" in states


def generated_grid(seed: int) -> list[list[float]]:
    """98 configurations on 50 questions: effects that differ, on questions of different difficulty."""
    drawn = random.Random(seed)
    difficulty = [drawn.gauss(0, 1.5) for _ in range(50)]
    grid = []
    for _ in range(98):
        effect = drawn.gauss(0, 1.5)
        grid.append([1 / (1 + math.exp(-(effect + hard + drawn.gauss(0, 0.3)))) for hard in difficulty])
    return grid


def replay(grid: list[list[float]], *, order: Sequence[int], halving: Halving) -> tuple[float, float]:
    """Halve a bracket of all configurations (rows) over the questions (columns): (share of the cost, regret).

    The regret is what the winner's true mean lacks to the best one's.
    """
    bracket = Bracket(range(len(grid)), num_questions=len(order), halving=halving)
    num_rows, complete = 0, ()
    while not bracket.is_over:
        rows = bracket.pending()
        num_rows += len(rows)
        for trial, question in rows:
            bracket.answer(trial, question, grid[trial][order[question]])
        over = bracket.advance()
        complete = () if over is None else over.complete
    truth = [math.fsum(values) / len(values) for values in grid]
    return num_rows / (len(grid) * len(order)), max(truth) - truth[complete[0]]


def mean_regret(grid: list[list[float]], *, orders: int) -> float:
    regrets = []
    for seed in range(orders):
        order = list(range(len(grid[0])))
        random.Random(seed).shuffle(order)
        cost_share, regret = replay(grid, order=order, halving=Halving())
        assert cost_share <= 0.31
        regrets.append(regret)
    return math.fsum(regrets) / len(regrets)


def test_halving_finds_the_best_of_a_generated_grid_for_a_third_of_its_cost() -> None:
    assert mean_regret(generated_grid(0), orders=20) <= 0.002
    assert replay(generated_grid(1), order=range(50), halving=Halving(rungs=1))[0] == 1.0


def test_trials_without_numbers_all_fail_and_none_completes() -> None:
    bracket = Bracket([0, 1], num_questions=1, halving=Halving())
    bracket.answer(0, 0, math.nan)
    bracket.answer(1, 0, math.inf)
    assert bracket.is_over and bracket.advance() is None
    assert bracket.state(0) == bracket.state(1) == "failed"


def test_halving_on_recorded_results(repository: Path) -> None:
    folder = Path(os.environ.get("FLATOUT_DATA", repository.parent / "shared" / "data")) / "caa"
    files = sorted(folder.glob("*.grid.json"))
    if not files:
        pytest.skip("needs caa/*.grid.json: set FLATOUT_DATA to the folder that holds caa")
    for path in files:
        grid = [one["p_matching"] for one in json.loads(path.read_text(encoding="utf-8"))]
        assert len(grid) == 98
        assert mean_regret(grid, orders=40) <= 0.002, path.name
