from __future__ import annotations

import math

import numpy as np
import pytest

from flatout.engines.steering.search.retest import FEWEST, retest, side_effects
from flatout.errors import BadInput


def test_the_interval_is_that_of_the_paired_difference() -> None:
    drawn = np.random.default_rng(0)
    plain = drawn.uniform(0, 1, 60)
    steered = plain + 0.05 + drawn.normal(0, 0.01, 60)
    found = retest(list(steered), list(plain))
    assert found.num_questions == 60
    assert found.difference.value == pytest.approx(float((steered - plain).mean()))
    assert 0.04 < found.difference.low < found.difference.value < found.difference.high < 0.06
    # Unpaired, the questions' difficulty would hide it.
    assert found.steered.low < found.baseline.high
    assert found.is_certain


def test_no_effect_is_not_certain_and_a_seed_gives_the_same_interval() -> None:
    drawn = np.random.default_rng(1)
    plain, steered = drawn.uniform(0, 1, (2, 40)).tolist()
    found = retest(steered, plain, seed=5)
    assert not found.is_certain
    assert found == retest(steered, plain, seed=5)
    assert found != retest(steered, plain, seed=6)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    drawn = np.random.default_rng(2)
    covered = 0
    for _ in range(60):
        steered = drawn.normal(0.3, 1.0, 80)
        found = retest(steered.tolist(), [0.0] * 80)
        covered += found.difference.low <= 0.3 <= found.difference.high
    assert covered >= 51  # 57 expected; fewer than 51 has a chance below 1 %


@pytest.mark.parametrize("number", [1, 2, FEWEST - 1])
def test_too_few_questions_have_a_mean_and_no_interval(number: int) -> None:
    found = retest([0.5] * number, [0.25] * number)
    assert found.difference.value == 0.25
    assert found.difference.bounds is None and found.steered.bounds is None and not found.is_certain
    assert side_effects([(-1.0, 2)] * number, [(-1.0, 2)] * number).ratio.bounds is None


def test_an_interval_of_the_fewest_values_holds_the_truth_nine_times_in_ten() -> None:
    drawn = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        found = retest(drawn.normal(0.3, 1.0, FEWEST).tolist(), [0.0] * FEWEST)
        assert found.difference.bounds is not None
        covered += found.difference.bounds[0] <= 0.3 <= found.difference.bounds[1]
    assert covered / 400 == pytest.approx(0.9, abs=0.04)


def test_values_must_come_in_pairs() -> None:
    with pytest.raises(BadInput, match="3 steered and 2 unsteered"):
        retest([1.0, 2.0, 3.0], [1.0, 2.0])
    with pytest.raises(BadInput, match="at least 1 question"):
        retest([], [])
    with pytest.raises(BadInput, match="not finite"):
        retest([1.0, math.nan], [1.0, 1.0])


def test_perplexity_is_counted_by_token() -> None:
    unsteered, steered = [(-6.0, 3), (-2.0, 1)], [(-9.0, 3), (-3.0, 1)]
    found = side_effects(steered, unsteered)
    assert (found.num_texts, found.num_tokens) == (2, 4)
    assert found.unsteered == pytest.approx(math.exp(2))
    assert found.steered == pytest.approx(math.exp(3))
    assert found.ratio.value == pytest.approx(math.e)
    many = side_effects(steered * 5, unsteered * 5).ratio
    assert many.low == pytest.approx(math.e) and many.high == pytest.approx(math.e)


def test_neutral_texts_need_tokens() -> None:
    with pytest.raises(BadInput, match="neutral texts"):
        side_effects([], [])
    with pytest.raises(BadInput, match="neutral texts"):
        side_effects([(0.0, 0)], [(0.0, 0)])
