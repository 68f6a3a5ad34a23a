"""A worker lives while its number moves, whatever the clocks of machines say."""

from __future__ import annotations

import optuna
import pytest

from flatout.engines.steering.workers.heartbeat import ENDED, KEY, SILENT_BEATS, Heartbeat, wait_for_silence


@pytest.fixture
def study() -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study()


class Clock:
    """Time that passes only in pauses; `beating` workers beat in each of them, for so many pauses."""

    def __init__(self, study: optuna.Study, beating: dict[str, int]) -> None:
        self.now_s = 0.0
        self._study, self._beating = study, beating

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        for worker, left in self._beating.items():
            if left:
                self._beating[worker] = left - 1
                self._study.set_user_attr(KEY + worker, 100 - left)


def test_a_worker_beats_until_it_ends(study: optuna.Study) -> None:
    with Heartbeat(study, "a", beat_s=0.001) as beating:
        for _ in range(600):  # until it has begun, also on a busy machine
            if study.user_attrs.get(KEY + "a", 0) >= 1:
                break
            beating._over.wait(0.1)
        assert study.user_attrs[KEY + "a"] >= 1
    assert study.user_attrs[KEY + "a"] == ENDED


def test_one_that_ended_never_beat_or_is_known_to_be_dead_is_not_waited_for(study: optuna.Study) -> None:
    assert wait_for_silence(study, []) is None
    study.set_user_attr(KEY + "a", ENDED)
    study.set_user_attr(KEY + "b", 3)
    assert wait_for_silence(study, ["a"]) == "a"
    assert wait_for_silence(study, ["never"]) == "never"
    assert wait_for_silence(study, ["b"], known_dead={"b"}) == "b"


def test_a_silent_one_is_dead_after_some_beats(study: optuna.Study) -> None:
    study.set_user_attr(KEY + "a", 5)
    said: list[str] = []
    clock = Clock(study, {})
    found = wait_for_silence(
        study, ["a"], beat_s=1.0, on_progress=said.append, clock=clock, pause=clock.pause
    )
    assert found == "a"
    assert SILENT_BEATS < clock.now_s <= SILENT_BEATS + 1
    assert said == ["waiting for a to finish or fall silent"]


def test_one_that_beats_is_waited_for(study: optuna.Study) -> None:
    study.set_user_attr(KEY + "a", 0)
    clock = Clock(study, {"a": 50})
    assert wait_for_silence(study, ["a"], beat_s=1.0, clock=clock, pause=clock.pause) == "a"
    assert clock.now_s > 25
