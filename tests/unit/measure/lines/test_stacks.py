from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout.measure import clock as clocks
from flatout.measure.clock import Clock
from flatout.measure.evidence import Stacks
from flatout.measure.lines.stacks import LEAST_SLACK_NS, StackSampler, stack_of, wake_on_time
from flatout.measure.user_code import UserCode

HERE = Path(__file__)


def line_of(part: str) -> int:
    lines = HERE.read_text().splitlines()
    (number,) = [n for n, text in enumerate(lines, start=1) if text.strip().startswith(part)]
    return number


def spend(seconds: float) -> None:
    until = time.thread_time() + seconds  # of computing, however many jobs share the processor
    while time.thread_time() < until:
        sum(range(50))  # here the time goes


def step(clock: Clock) -> None:
    spend(0.15)  # between the phases
    clock.enter(clocks.FORWARD)
    spend(0.05)
    clock.leave()
    clock.enter(clocks.EXCLUDED)
    spend(0.05)
    clock.leave()


@pytest.fixture(scope="module")
def stacks() -> Stacks:
    clock = Clock()
    sampler = StackSampler(clock, UserCode(str(HERE.parent)))
    sampler.start()
    for _ in range(3):
        step(clock)
    sampler.step_end()
    return sampler.stop(usual_steps=[0])


def test_samples_are_counted_by_phase_and_what_is_ours_is_left_out(stacks: Stacks) -> None:
    assert stacks.num_steps == 1
    assert set(stacks.samples_by_phase) == {"rest", "forward"}
    assert stacks.samples_by_phase["rest"] > stacks.samples_by_phase["forward"] > 0


def test_a_path_goes_from_the_outermost_line_to_the_innermost(stacks: Stacks) -> None:
    path = next(path for path in stacks.paths if path.phase == "rest")
    lines = [place.line for place in path.places]
    assert line_of("spend(0.15)") in lines
    assert lines.index(line_of("spend(0.15)")) < len(lines) - 1
    assert path.places[-1].function == "spend"
    assert {place.file for place in path.places} == {HERE.name}


def test_the_paths_hold_every_sample_of_a_small_job(stacks: Stacks) -> None:
    assert sum(path.samples for path in stacks.paths) == sum(stacks.samples_by_phase.values())
    assert list(stacks.paths) == sorted(stacks.paths, key=lambda path: -path.samples)


def test_an_instrument_that_fails_says_so_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = StackSampler(Clock(), UserCode(str(HERE.parent)))

    def fail(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(sampler, "_look", fail)
    sampler.start()
    spend(0.05)
    with pytest.raises(KeyError, match="broken"):
        sampler.stop(usual_steps=[0])


@pytest.mark.skipif(sys.platform != "linux", reason="a wish of Linux")
def test_a_thread_that_looks_sleeps_no_longer_than_it_asks_to() -> None:
    get_timer_slack, found = 30, []

    def look() -> None:
        wake_on_time()
        found.append(ctypes.CDLL(None).prctl(get_timer_slack, 0, 0, 0, 0))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [LEAST_SLACK_NS]


def nested(depth: int) -> Iterator[int]:
    yield from nested(depth - 1) if depth else range(3)


@pytest.fixture
def collects_often() -> Iterator[None]:
    """A collector whose listener lets other threads go on."""

    def let_others_go_on(_phase: str, _info: dict[str, int]) -> None:
        time.sleep(1e-5)

    threshold = gc.get_threshold()
    gc.callbacks.append(let_others_go_on)
    gc.set_threshold(20, 1000, 1000)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks.remove(let_others_go_on)


@pytest.mark.usefixtures("collects_often")
def test_a_stack_is_whole_though_its_thread_goes_on() -> None:
    """Followed frame by frame in Python, some are cut where a generator was suspended meanwhile."""
    began, ended, interval_s = threading.Event(), threading.Event(), sys.getswitchinterval()

    def keep_going() -> None:
        began.set()
        while not ended.is_set():
            sum(nested(100))

    thread = threading.Thread(target=keep_going)
    thread.start()
    began.wait()
    sys.setswitchinterval(1e-6)
    try:
        assert thread.ident is not None
        stacks = [stack_of(thread.ident) for _ in range(2000)]
    finally:
        sys.setswitchinterval(interval_s)
        ended.set()
        thread.join()
    assert {lines[-1][0].co_name for lines in stacks} == {"_bootstrap"}
    assert all(type(line) is int for lines in stacks for _code, line in lines)
    assert stack_of(thread.ident) == []
    assert stack_of(threading.get_ident())[1][0] is sys._getframe().f_code


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_goes_on_as_it_was(collects: bool) -> None:
    if not collects:
        gc.disable()
    try:
        assert stack_of(threading.get_ident()) and stack_of(0) == []
        assert gc.isenabled() == collects
    finally:
        gc.enable()
