from __future__ import annotations

import threading
import time

import pytest

from flatout.measure.clock import now
from flatout.measure.run.lineage import LEAST_SET_UP_S, OVERDUE_S
from flatout.measure.run.step_blocks.deadline import LEAST_NEWS_S, LEAST_STEPS_S, OVERDUE, Deadline, Watchdog

NEVER_S = 60.0


def test_the_time_counts_from_the_beginning_that_is_given() -> None:
    began_s = time.monotonic() - 40.0
    deadline = Deadline(60.0, began_s=began_s)
    assert deadline.ends_s == began_s + 60.0
    assert deadline.seconds_left <= 20.0
    assert deadline.set_up_s == 0.0


def test_a_first_step_that_comes_late_leaves_the_steps_some_time() -> None:
    deadline = Deadline(60.0, began_s=time.monotonic() - 1000.0)
    deadline.note_first_step()
    assert deadline.first_step_s is not None
    assert deadline.ends_s == deadline.first_step_s + LEAST_STEPS_S
    assert deadline.set_up_s == pytest.approx(1000.0, abs=10.0)


def test_a_first_step_that_comes_early_changes_nothing() -> None:
    deadline = Deadline(60.0, began_s=None)
    ends_s = deadline.ends_s
    deadline.note_first_step()
    assert deadline.ends_s == ends_s


def test_set_up_may_take_longer_than_the_steps() -> None:
    deadline = Deadline(5.0, began_s=100.0)
    assert deadline.due_s((), step_began_s=0.0) == 100.0 + LEAST_SET_UP_S + OVERDUE_S


def test_a_job_whose_own_processes_train_gets_no_more_time_for_its_set_up() -> None:
    deadline = Deadline(5.0, began_s=100.0)
    assert deadline.due_s((), step_began_s=0.0, trains_elsewhere=True) == 105.0 + OVERDUE_S


def test_a_step_that_usually_takes_long_may_do_so_past_the_end() -> None:
    deadline = Deadline(0.0, began_s=None)
    deadline.note_first_step()
    began_s = time.monotonic()
    due_s = deadline.due_s(iter([30.0, 30.0, 900.0]), step_began_s=now())
    assert due_s == pytest.approx(began_s + 30.0 * OVERDUE, abs=10.0)


def test_news_is_what_differs_from_what_was_said() -> None:
    deadline = Deadline(60.0, began_s=None)
    assert deadline.is_news(100.0)
    assert not deadline.is_news(100.0 + LEAST_NEWS_S / 2)
    assert deadline.is_news(100.0 + 2 * LEAST_NEWS_S)


def test_a_block_that_does_not_end_is_late_and_then_stuck() -> None:
    late, stuck = threading.Event(), threading.Event()
    Watchdog().watch(longest_s=0.001, on_late=late.set, on_stuck=stuck.set)
    assert stuck.wait(NEVER_S) and late.is_set()


def test_a_block_that_goes_on_once_it_was_released_is_only_late() -> None:
    watchdog, late, stuck = Watchdog(), threading.Event(), threading.Event()

    def release() -> None:
        watchdog.end()
        late.set()

    watchdog.watch(longest_s=0.001, on_late=release, on_stuck=stuck.set)
    assert late.wait(NEVER_S)
    for thread in threading.enumerate():
        if thread.name == "flatout-watchdog":
            thread.join(NEVER_S)
    assert not stuck.is_set()
