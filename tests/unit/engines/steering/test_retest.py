from __future__ import annotations

import math

import numpy as np
import pytest

from flatout.engines.steering.retest import retest, side_effects
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


def test_values_must_come_in_pairs() -> None:
    with pytest.raises(BadInput, match="3 steered and 2 unsteered"):
        retest([1.0, 2.0, 3.0], [1.0, 2.0])
    with pytest.raises(BadInput, match="at least 2 questions"):
        retest([1.0], [1.0])
    with pytest.raises(BadInput, match="not finite"):
        retest([1.0, math.nan], [1.0, 1.0])


def test_perplexity_is_counted_by_token() -> None:
    unsteered, steered = [(-6.0, 3), (-2.0, 1)], [(-9.0, 3), (-3.0, 1)]
    found = side_effects(steered, unsteered)
    assert (found.num_texts, found.num_tokens) == (2, 4)
    assert found.unsteered == pytest.approx(math.exp(2))
    assert found.steered == pytest.approx(math.exp(3))
    assert found.ratio.value == pytest.approx(math.e)
    assert found.ratio.low == pytest.approx(math.e) and found.ratio.high == pytest.approx(math.e)


def test_neutral_texts_need_tokens() -> None:
    with pytest.raises(BadInput, match="neutral texts"):
        side_effects([], [])
    with pytest.raises(BadInput, match="neutral texts"):
        side_effects([(0.0, 0)], [(0.0, 0)])
