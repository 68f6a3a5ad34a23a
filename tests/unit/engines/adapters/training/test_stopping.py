"""A signal waits for the border of a step; patience counts evaluations."""

from __future__ import annotations

import os
import signal

import pytest

from flatout.engines.adapters.training.checkpoint import Progress
from flatout.engines.adapters.training.stopping import StopRequest, after_evaluation


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_flag_and_a_second_one_ends_at_once(number: int) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.came
        os.kill(os.getpid(), number)
        assert stop.came
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_patience_counts_evaluations_without_a_better_one() -> None:
    progress, course = Progress(), []
    for step, score in enumerate([50.0, 60.0, 60.0, 59.0], start=1):
        progress, is_best = after_evaluation(
            progress, score=score, scores={"accuracy": score}, step=step, patience=2
        )
        course.append((is_best, progress.evaluations_without_better, progress.done))
    assert course == [(True, 0, None), (True, 0, None), (False, 1, None), (False, 2, 4)]
    assert (progress.best_score, progress.best_step, progress.scores) == (60.0, 2, {"accuracy": 60.0})


def test_without_patience_nothing_is_finished_early() -> None:
    progress = Progress(best_score=1.0, best_step=1)
    for step in range(2, 50):
        progress, is_best = after_evaluation(progress, score=0.5, scores={}, step=step, patience=None)
        assert not is_best and progress.done is None


def test_a_score_that_is_no_number_is_never_the_best() -> None:
    progress, is_best = after_evaluation(Progress(), score=float("nan"), scores={}, step=1, patience=3)
    assert not is_best and progress.best_score is None and progress.evaluations_without_better == 1
    progress, is_best = after_evaluation(progress, score=-5.0, scores={}, step=2, patience=3)
    assert is_best and progress.best_score == -5.0
