from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout.measure.patches import Patches
from flatout.measure.process import garbage
from flatout.measure.process.garbage import GarbageWatch, num_paused
from flatout.measure.user_code import UserCode
from tests.support.measure import line_of


@pytest.fixture
def watch(request: pytest.FixtureRequest) -> Iterator[GarbageWatch]:
    patches, callbacks, collect = Patches(), list(gc.callbacks), gc.collect
    watch = GarbageWatch(UserCode(str(request.path.parent)))
    watch.install(patches)
    yield watch
    patches.undo()
    assert gc.callbacks == callbacks and gc.collect is collect


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a second after the one before."""
    seconds = iter(range(1000))
    monkeypatch.setattr(garbage, "now", lambda: float(next(seconds)))


@pytest.mark.usefixtures("clock")
def test_pauses_are_those_of_real_steps_and_calls_are_named(watch: GarbageWatch) -> None:
    gc.collect()
    watch.step_end("warmup")
    gc.collect()
    watch.forget_step()
    for _ in range(3):
        gc.collect()  # at: here
        watch.step_end("real")
    found = watch.evidence(steps_s=10.0)
    assert found is not None and found.place is not None
    assert (found.num_steps, found.steps_s, found.num_paused) == (3, 10.0, 3)
    assert found.pauses_s >= 3 and found.asked_s == 3.0
    assert found.place.line == line_of(Path(__file__), "here")


@pytest.mark.usefixtures("clock")
def test_a_collection_that_comes_by_itself_is_not_asked_for(watch: GarbageWatch) -> None:
    watch._note("start", {})
    watch._note("stop", {})
    watch.step_end("real")
    found = watch.evidence(steps_s=2.0)
    assert found is not None and (found.pauses_s, found.asked_s, found.place) == (1.0, 0.0, None)


@pytest.mark.usefixtures("clock")
def test_a_collection_in_a_step_that_compiles_belongs_to_compiling(watch: GarbageWatch) -> None:
    watch._note("start", {})
    watch._note("stop", {})
    watch.step_end("real", compiled=True)
    assert watch.evidence(steps_s=2.0) is None


def test_without_collections_there_is_nothing_to_tell(watch: GarbageWatch) -> None:
    watch.pauses_s = [0.0, 0.0]
    assert watch.evidence(steps_s=1.0) is None


def test_a_stopped_watch_collects_nothing(watch: GarbageWatch) -> None:
    loop: list[object] = []
    loop.append(loop)
    del loop
    watch.stopped = True
    assert gc.collect() == 0
    watch.stopped = False
    assert gc.collect() >= 1


def test_the_steps_that_hold_most_pauses_are_counted() -> None:
    assert num_paused([0.0, 0.5, 0.0, 0.001]) == 1
    assert num_paused([1.0, 1.0, 1.0, 1.0]) == 4


@pytest.fixture
def only_listener(watch: GarbageWatch) -> Iterator[None]:
    others = [listener for listener in gc.callbacks if listener != watch._note]
    for listener in others:
        gc.callbacks.remove(listener)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    gc.callbacks[:0] = others


def collect_and_wait() -> None:
    gc.collect()
    time.sleep(60)


def let_go_and_wait(held: list[Any]) -> None:
    held.clear()
    time.sleep(60)


@pytest.mark.usefixtures("only_listener")
def test_an_interrupt_that_comes_during_a_collection_is_not_lost() -> None:
    class Interrupts:
        __del__ = functools.partial(ctypes.CDLL(None).kill, os.getpid(), signal.SIGINT)  # then the listener

    found = Interrupts()
    found.itself = found  # type: ignore[attr-defined]
    del found
    with pytest.raises(KeyboardInterrupt):
        collect_and_wait()


@pytest.mark.usefixtures("watch")
def test_an_interrupt_in_the_callback_of_a_weak_reference_is_not_lost() -> None:
    class Held:
        pass

    held = [Held()]
    reference = weakref.ref(held[0], lambda _reference: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        let_go_and_wait(held)
    assert reference() is None
