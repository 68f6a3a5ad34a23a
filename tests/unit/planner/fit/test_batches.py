from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.planner.fit.batches import (
    Choice,
    divisors,
    is_sensible,
    largest_divisor,
    learning_rate_rule,
    nearest_choices,
)


@given(st.integers(1, 5000))
def test_divisors_are_all_divisors_largest_first(number: int) -> None:
    assert divisors(number) == [i for i in range(number, 0, -1) if number % i == 0]


@pytest.mark.parametrize(
    ("number", "at_most", "expected"), [(64, 45, 32), (64, 64, 64), (61, 45, 1), (60, 45, 30), (6, 0, None)]
)
def test_the_largest_divisor(number: int, at_most: int, expected: int | None) -> None:
    assert largest_divisor(number, at_most=at_most) == expected


def test_a_divisor_that_leaves_the_device_idle_is_no_answer() -> None:
    assert is_sensible(9, largest=26)
    assert not is_sensible(1, largest=45)


def test_the_nearest_choices_of_a_prime() -> None:
    choices = nearest_choices(61, largest=45, ranks=1)
    assert choices == (
        Choice(batch_size=30, accumulation=2, effective_batch=60),
        Choice(batch_size=31, accumulation=2, effective_batch=62),
        Choice(batch_size=45, accumulation=1, effective_batch=45),
    )
    assert str(choices[0]) == "60 (30 × 2)"


@given(st.integers(1, 400), st.integers(1, 60), st.integers(1, 8))
def test_choices_are_true_sensible_and_near(per_rank: int, largest: int, ranks: int) -> None:
    choices = nearest_choices(per_rank * ranks, largest=largest, ranks=ranks)
    for choice in choices:
        assert choice.effective_batch == choice.batch_size * choice.accumulation * ranks
        assert choice.effective_batch != per_rank * ranks
        assert choice.batch_size <= largest
        assert abs(choice.effective_batch - per_rank * ranks) <= max(largest, per_rank) * ranks
    assert any(choice.effective_batch > per_rank * ranks for choice in choices)


def test_the_rule_for_the_learning_rate_is_stated() -> None:
    assert learning_rate_rule(64, 256, learning_rate=2e-4) == (
        "the effective batch goes from 64 to 256 (×4); the learning rate 0.0002 is left alone: the linear "
        "rule (SGD) would give 0.0008, the square-root rule (Adam) 0.0004"
    )
    assert "×4 by the linear rule (SGD), ×2 by the square-root rule" in learning_rate_rule(
        64, 256, learning_rate=None
    )
