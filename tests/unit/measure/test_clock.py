from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure import clock as clock_module
from flatout.measure.clock import (
    BACKWARD,
    EXCLUDED,
    FORWARD,
    NUM_REGIONS,
    PHASES,
    REST,
    WAIT,
    Clock,
    phases_s,
    read_marks,
)


class Time:
    """A clock that is turned by hand, so that sums are exact."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock_module, "now", time)
    return time


def test_time_belongs_to_the_innermost_region_alone(time: Time) -> None:
    clock = Clock()
    time.now_s = 1
    clock.enter(FORWARD)
    time.now_s = 3
    clock.enter(WAIT)
    time.now_s = 7
    assert clock.leave() == 4
    time.now_s = 15
    assert clock.leave() == 8
    time.now_s = 31
    totals = clock.take()
    assert (totals[REST], totals[FORWARD], totals[WAIT]) == (1 + 16, 2 + 8, 4)


def test_taking_starts_from_zero_inside_the_same_region(time: Time) -> None:
    clock = Clock()
    clock.enter(BACKWARD)
    time.now_s = 5
    assert clock.take()[BACKWARD] == 5
    time.now_s = 8
    clock.leave()
    assert clock.take() == [0, 0, 0, 3, 0, 0, 0]
    assert clock.stack == [REST]


moves = st.lists(st.one_of(st.integers(0, NUM_REGIONS - 1), st.just("leave"), st.just("take")), max_size=60)


@given(moves=moves)
def test_regions_sum_to_the_wall_clock_however_they_are_nested(moves: list[Any]) -> None:
    clock = Clock()
    start = clock.last
    summed = 0.0
    for move in moves:
        if move == "take":
            summed += sum(clock.take())
        elif move != "leave":
            clock.enter(move)
        elif len(clock.stack) > 1:
            clock.leave()
    summed += sum(clock.take())
    assert summed == pytest.approx(clock.last - start, abs=1e-9)
    assert all(total >= 0 for total in clock.totals)


def test_phases_are_named_in_the_order_of_the_regions_and_leave_the_excluded_out() -> None:
    totals = [float(region) for region in range(NUM_REGIONS)]
    assert phases_s(totals) == {phase: float(region) for region, phase in enumerate(PHASES)}
    assert totals[EXCLUDED] not in phases_s(totals).values()


class Event:
    """An event with a known time on the device; read_marks asks it only what torch's events answer."""

    def __init__(self, at_ms: float, *, happened: bool = True) -> None:
        self.at_ms, self.happened = at_ms, happened

    def query(self) -> bool:
        return self.happened

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def test_marks_become_seconds_by_phase_on_the_device() -> None:
    marks = [(REST, Event(0)), (FORWARD, Event(100)), (BACKWARD, Event(400)), (REST, Event(1000))]
    read = read_marks(marks)
    assert read is not None
    step_s, by_phase_s = read
    assert step_s == pytest.approx(1.0)
    assert by_phase_s["rest"] == pytest.approx(0.1)
    assert by_phase_s["forward"] == pytest.approx(0.3)
    assert by_phase_s["backward"] == pytest.approx(0.6)


def test_what_is_excluded_is_no_part_of_the_step_on_either_clock(time: Time) -> None:
    clock, marks = Clock(), Marks()
    clock.marks = marks  # type: ignore[assignment]
    with clock.excluded():
        time.now_s = 5
    assert clock.take()[EXCLUDED] == 5
    assert marks.seen == [EXCLUDED, REST]
    ends = [(REST, Event(0)), (EXCLUDED, Event(100)), (REST, Event(400)), (REST, Event(1000))]
    assert read_marks(ends) == (pytest.approx(0.7), None)


def test_what_is_booked_out_leaves_the_region_under_way(time: Time) -> None:
    clock = Clock()
    clock.enter(FORWARD)
    time.now_s = 5
    clock.book_out(2)
    clock.leave()
    totals = clock.take()
    assert (totals[FORWARD], totals[EXCLUDED], sum(totals)) == (3, 2, 5)


class Marks:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def mark(self, region: int, *, always: bool) -> None:
        assert always
        self.seen.append(region)


def test_marks_the_device_has_not_reached_are_unknown() -> None:
    assert read_marks([(REST, Event(0)), (REST, Event(1, happened=False))]) is None
    assert read_marks([]) is None
