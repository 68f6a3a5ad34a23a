"""A replay keeps the pace of its samples, divided by its speed."""

from __future__ import annotations

import pytest

from flatout.ground.errors import BadInput
from flatout.monitor.past.playback import LONGEST_PAUSE_S, Playback
from flatout.monitor.sample import Sample
from tests.support.monitor_played import PlayedClock


def samples(*seconds: float) -> list[Sample]:
    return [Sample(time_s=second) for second in seconds]


def times(found: list[Sample]) -> list[float]:
    return [sample.time_s for sample in found]


def test_samples_come_when_they_are_due() -> None:
    clock = PlayedClock()
    playback = Playback(samples(0, 1, 2, 4), speed=2.0, clock=clock)
    assert times(playback.advance()) == [0]
    assert playback.wait_s == 0.5
    clock.now_s += 0.4
    assert playback.advance() == []
    clock.now_s += 0.7
    assert times(playback.advance()) == [1, 2]
    assert not playback.is_over
    clock.now_s += 1.0
    assert times(playback.advance()) == [4]
    assert playback.is_over and playback.wait_s is None
    assert times(list(playback.recent())) == [0, 1, 2, 4]


def test_a_fast_replay_gives_all_at_once() -> None:
    playback = Playback(samples(*range(500)), speed=1e12, clock=PlayedClock())
    assert len(playback.advance()) == 1
    clock = PlayedClock()
    playback = Playback(samples(*range(500)), speed=1e12, clock=clock)
    clock.now_s += 1e-3
    assert len(playback.advance()) == 500


def test_a_long_silence_is_cut_short_and_two_minutes_are_kept() -> None:
    clock = PlayedClock()
    playback = Playback(samples(0, 1e6), clock=clock)
    playback.advance()
    assert playback.wait_s == LONGEST_PAUSE_S
    clock.now_s += LONGEST_PAUSE_S
    assert times(playback.advance()) == [1e6]
    assert times(list(playback.recent())) == [1e6]


def test_what_a_held_picture_missed_is_not_made_up_for() -> None:
    clock = PlayedClock()
    playback = Playback(samples(*range(100)), clock=clock)
    playback.advance()
    clock.now_s += 60
    assert times(playback.advance()) == [1]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_is_a_positive_number(speed: float) -> None:
    with pytest.raises(BadInput, match="--speed"):
        Playback(samples(1), speed=speed)


def test_a_run_without_samples_is_named() -> None:
    with pytest.raises(BadInput, match="no samples"):
        Playback([])
