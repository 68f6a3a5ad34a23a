from __future__ import annotations

import pytest

from flatout.decisions import Decision
from flatout.errors import BadInput
from flatout.planner.fit.suggestions import EvaluationFit, GroupFit, Suggestion, merged
from flatout.planner.forecast.questions import Peak
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
    found = merged([suggestion("a", 4), suggestion("b", 8), suggestion("c", 4), suggestion("a", 4)])
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
