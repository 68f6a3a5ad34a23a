"""Idle and stuck connections are closed in time; busy ones never."""

from __future__ import annotations

from dataclasses import dataclass, field

from flatout.monitor.web.connections import IDLE_S, PLENTY, STUCK_S, Sweep


@dataclass(eq=False)
class Connection:
    """As much of a connection of uvicorn as is looked at."""

    has_request: bool = False
    waiting_bytes: int = 0
    is_closed: bool = False
    transport: Connection = field(init=False)
    response_complete: bool = False

    def __post_init__(self) -> None:
        self.transport = self

    @property
    def cycle(self) -> Connection | None:
        return self if self.has_request else None

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes

    def abort(self) -> None:
        self.is_closed = True


def test_idle_and_stuck_ones_are_closed_in_time_and_busy_ones_stay() -> None:
    silent, answered = Connection(), Connection(has_request=True, response_complete=True)
    busy, stuck = Connection(has_request=True), Connection(has_request=True, waiting_bytes=9)
    all_of_them = {silent, answered, busy, stuck}
    sweep = Sweep(all_of_them)
    for now_s in (0.0, IDLE_S):
        sweep(now_s)
        assert not any(each.is_closed for each in all_of_them)
    sweep(IDLE_S + 1)
    assert {each for each in all_of_them if each.is_closed} == {silent, answered}
    sweep(STUCK_S + 1)
    assert stuck.is_closed
    assert not busy.is_closed


def test_one_that_asks_or_takes_its_answer_begins_anew() -> None:
    connection = Connection(has_request=True, waiting_bytes=9)
    sweep = Sweep({connection})
    sweep(0.0)
    connection.waiting_bytes = 0
    sweep(STUCK_S - 1)
    connection.response_complete = True
    sweep(STUCK_S + 1)
    assert not connection.is_closed


def test_while_places_are_short_the_longest_idle_go_at_once() -> None:
    old = [Connection() for _ in range(10)]
    connections = set(old)
    sweep = Sweep(connections)
    sweep(0.0)
    connections |= {Connection(has_request=True) for _ in range(PLENTY - 12)} | {Connection()}
    sweep(1.0)
    assert not any(each.is_closed for each in connections)  # there is room
    connections |= {Connection(has_request=True) for _ in range(4)}
    sweep(2.0)
    assert sum(each.is_closed for each in old) == 3
    assert sum(each.is_closed for each in connections) == 3


def test_one_too_many_makes_room_at_once_and_stays() -> None:
    connections: set[Connection] = set()
    sweep = Sweep(connections)
    came = [Connection() for _ in range(PLENTY + 3)]
    for number, each in enumerate(came):
        connections.add(each)
        sweep.arrived(each, float(number) / PLENTY)
        connections -= {one for one in connections if one.is_closed}
    assert [each.is_closed for each in came] == [True] * 3 + [False] * PLENTY
