from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flatout.measure.clock import EXCLUDED, FORWARD, Clock
from flatout.measure.lines import stack_watch
from flatout.measure.lines.stack_watch import Look, StackWatch, what_it_does
from flatout.measure.user_code import UserCode

HERE = Path(__file__)


def spend(seconds: float) -> None:
    until = time.thread_time() + seconds  # of computing, however many jobs share the processor
    while time.thread_time() < until:
        sum(range(50))


def spending(watch: StackWatch) -> list[Look]:
    """Those looks that found this thread in `spend`."""
    return [look for look in watch.looks if look.places and look.places[-1].function == "spend"]


def evaluate(clock: Clock) -> None:
    clock.enter(FORWARD)
    spend(0.25)
    clock.leave()
    clock.enter(EXCLUDED)
    spend(0.1)
    clock.leave()


def test_looks_name_the_lines_from_the_outermost_to_the_innermost() -> None:
    clock = Clock()
    watch = StackWatch(clock, UserCode(str(HERE.parent)))
    start = time.perf_counter()
    watch.start()
    while not (looks := spending(watch)):  # on a busy machine the first may come late
        evaluate(clock)
    spent_s = time.perf_counter() - start
    watch.stop()
    assert all(look.in_model for look in looks)  # never in what is excluded
    assert [place.function for place in looks[-1].places][-2:] == ["evaluate", "spend"]
    assert 0 < sum(look.weight_s for look in looks) <= spent_s
    assert looks == sorted(looks, key=lambda look: look.time_s)


def test_looks_that_were_due_in_an_earlier_phase_are_told_apart() -> None:
    """Each phase is far shorter than the time that this thread may keep the lock."""
    clock = Clock()
    watch = StackWatch(clock, UserCode(str(HERE.parent)))
    watch.start()
    while sum(look.due_earlier for look in watch.looks) < 3:
        clock.enter(FORWARD)
        spend(0.0005)
        clock.leave()
    watch.stop()
    assert all(look.late_s > 0 for look in watch.looks if look.due_earlier)


class Order(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        spend(0.25)
        return iter([0])


def test_lines_that_a_loader_calls_are_told_from_those_that_call_it() -> None:
    watch = StackWatch(Clock(), UserCode(str(HERE.parent)))
    watch.start()
    for _attempt in range(20):  # until the order was looked at, also on a busy machine
        for _ in torch.utils.data.DataLoader([1], sampler=Order()):
            pass
        if looks := spending(watch):
            break
    watch.stop()
    look = looks[-1]
    assert look.library == "loading" and look.in_loader is not None
    outside, inside = look.places[: look.in_loader], look.places[look.in_loader :]
    assert outside[-1].function == "test_lines_that_a_loader_calls_are_told_from_those_that_call_it"
    assert [place.function for place in inside] == ["Order.__iter__", "spend"]


def test_a_long_run_keeps_half_of_its_looks_with_twice_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_watch, "MOST_LOOKS", 4)
    watch = StackWatch(Clock(), UserCode(str(HERE.parent)))
    watch.looks = [Look(float(at), 1.0, (), None, None, False) for at in range(4)]
    watch._thin_out()
    assert [(look.time_s, look.weight_s) for look in watch.looks] == [(0.0, 2.0), (2.0, 2.0)]
    assert watch._interval_s == 2 * stack_watch.INTERVAL_S


def test_a_forked_process_that_stops_the_looks_waits_for_no_lock() -> None:
    """The thread that looks may hold one at the fork, and it does not live on in the other process."""
    watch = StackWatch(Clock(), UserCode(str(HERE.parent)))
    locks = [each._cond for each in vars(watch).values() if isinstance(each, threading.Event)]  # type: ignore[attr-defined]
    for lock in locks:
        lock.acquire()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends one that waits
        watch.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_libraries_do_is_told_by_their_functions() -> None:
    assert what_it_does(torch.save.__code__) == "checkpoint"
    assert what_it_does(torch.load.__code__) is None
    assert what_it_does(torch.nn.Module.state_dict.__code__) == "checkpoint"
    assert what_it_does(torch.utils.data.DataLoader.__iter__.__code__) == "loading"
    assert what_it_does(torch.nn.Linear.forward.__code__) is None
