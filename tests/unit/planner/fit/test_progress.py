from __future__ import annotations

import pytest

from flatout.planner.fit.progress import Progress


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said() -> list[str]:
    return []


def test_what_begins_before_any_question_is_said_as_it_is(said: list[str]) -> None:
    Progress(said.append).work("importing")
    assert said == ["importing"]


def test_a_question_that_needs_no_trace_is_not_said(said: list[str]) -> None:
    progress = Progress(said.append)
    progress.expect([4, 1])
    progress.ask("first")
    progress.ask("second")
    assert said == []


def test_a_line_says_which_question_how_long_and_how_much_is_left(said: list[str], clock: Clock) -> None:
    progress = Progress(said.append, clock=clock)
    progress.expect([4, 4, 1])
    progress.ask("01_stage, largest batch")
    progress.count(4)
    progress.work("tracing")
    clock.now_s = 40
    progress.ask("02_stage, largest batch")
    progress.count(3)
    progress.work("tracing")
    clock.now_s = 60
    progress.work("tracing again")
    assert said == [
        "[1 of 3] 01_stage, largest batch: tracing",
        "[2 of 3, 40 s, about 50 s left] 02_stage, largest batch: tracing",
        "[2 of 3, 60 s, about 30 s left] 02_stage, largest batch: tracing again",
    ]


def test_what_is_left_is_reckoned_from_questions_that_took_traces(said: list[str], clock: Clock) -> None:
    progress = Progress(said.append, clock=clock)
    progress.expect([4, 4, 1])
    progress.ask("stored")
    clock.now_s = 2
    progress.ask("stored but for one")
    progress.count(1)
    progress.work("tracing")
    clock.now_s = 102
    progress.ask("evaluation")
    progress.work("tracing")
    assert said[-1] == "[3 of 3, 2 min, about 2 min left] evaluation: tracing"


def test_more_questions_than_expected_are_counted(said: list[str]) -> None:
    progress = Progress(said.append)
    progress.expect([1])
    for question in ("expected", "what would fit"):
        progress.ask(question)
        progress.work("tracing")
    assert said[-1] == "[2 of 2] what would fit: tracing"


def test_nobody_has_to_listen() -> None:
    Progress().work("tracing")
