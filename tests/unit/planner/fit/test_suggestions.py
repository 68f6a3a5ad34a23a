from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.memory.predict.forecast import Peak
from flatout.planner.fit.suggestions import (
    EvaluationFit,
    GroupFit,
    Suggestion,
    divisors,
    is_sensible,
    largest_divisor,
    learning_rate_rule,
    merge_equal,
    nearest_batches,
)
from tests.support import planner as plans

PEAK = Peak(allocated_bytes=1, reserved_bytes=2, process_bytes=3)


def suggestion(name: str, batch_size: int, *, keeps: bool = True) -> Suggestion:
    return Suggestion(
        names=(name,),
        batch_size=batch_size,
        accumulations={"training": 2},
        effective_batches={"training": 2 * batch_size},
        checkpointing=False,
        peak=PEAK,
        peaks={"training": PEAK},
        worst_stage="training",
        step_s=None,
        keeps_effective_batch=keeps,
        reason=Decision(value=name, reason=f"because of {name}", source="computed"),
    )


def group(*suggestions: Suggestion, checkpointing: bool = False) -> GroupFit:
    evaluation = EvaluationFit(batch_size=4, largest=8, suggested=None, peak=PEAK, reason="kept")
    stages = (plans.stage(name="one"), plans.stage(name="two", checkpointing=checkpointing))
    return GroupFit(stages=stages, largest=9, safe=8, suggestions=suggestions, evaluation=evaluation)


def test_equal_suggestions_are_one_with_all_names_and_the_first_reason() -> None:
    found = merge_equal([suggestion("a", 4), suggestion("b", 8), suggestion("c", 4), suggestion("a", 4)])
    assert [one.names for one in found] == [("a", "c"), ("b",)]
    assert found[0].reason.reason == "because of a"


def test_the_first_that_keeps_the_effective_batch_is_taken() -> None:
    found = group(suggestion("wide", 8, keeps=False), suggestion("kept", 4))
    assert found.suggestion(None).names == ("kept",)
    assert found.suggestion("wide").batch_size == 8


def test_a_name_that_nobody_bears() -> None:
    with pytest.raises(BadInput, match=r"there is no suggestion 'best' \(choose one of: a, b\)"):
        group(suggestion("a", 4), suggestion("b", 8)).suggestion("best")


def test_a_suggestion_under_another_name() -> None:
    renamed = suggestion("a", 4).named("fastest", "it was timed", source="measured")
    assert (renamed.names, renamed.batch_size) == (("fastest",), 4)
    assert (renamed.reason.value, renamed.reason.source) == ("fastest", "measured")


def test_a_group_checkpoints_when_one_of_its_stages_does() -> None:
    assert not group().checkpointing
    assert group(checkpointing=True).checkpointing


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


def test_the_nearest_batches_of_a_prime() -> None:
    assert nearest_batches(61, largest=45) == [(30, 2), (31, 2), (45, 1)]


@given(st.integers(1, 400), st.integers(1, 60))
def test_batches_are_others_sensible_and_near(per_rank: int, largest: int) -> None:
    found = nearest_batches(per_rank, largest=largest)
    for batch_size, accumulation in found:
        assert batch_size <= largest and batch_size * accumulation != per_rank
        assert abs(batch_size * accumulation - per_rank) <= max(largest, per_rank)
    assert any(batch_size * accumulation > per_rank for batch_size, accumulation in found)


def test_the_rule_for_the_learning_rate_is_stated() -> None:
    assert learning_rate_rule(64, 256, learning_rate=2e-4) == (
        "the effective batch goes from 64 to 256 (×4); the learning rate 0.0002 is left alone: the linear "
        "rule (SGD) would give 0.0008, the square-root rule (Adam) 0.0004"
    )
    assert "×4 by the linear rule (SGD), ×2 by the square-root rule" in learning_rate_rule(
        64, 256, learning_rate=None
    )
