"""The stress test fails within a second when a walk keeps a tuple that another thread fills."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from flatout.measure.lines import holders
from flatout.measure.lines.live_objects import alone, live_objects, without_collection
from flatout.measure.user_code import UserCode

WALK_S = 1.0
ROOT = Path(__file__).parents[4]


class Marked:
    """Nothing else is of this type."""


@contextmanager
def threads_that_build_tuples(num: int = 3) -> Iterator[list[BaseException]]:
    """Threads that make tuples item by item, as a pin-memory thread does; yields what they raised."""
    raised: list[BaseException] = []
    done = threading.Event()

    def build() -> None:
        try:
            while not done.is_set():
                assert len(tuple([each] for each in range(200))) == 200
        except BaseException as error:  # noqa: BLE001 - whatever the walk did to this thread
            raised.append(error)

    threads = [threading.Thread(target=build) for _ in range(num)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    try:
        yield raised
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval_s)


def repeat(walk: Callable[[], object], raised: list[BaseException]) -> None:
    until = time.perf_counter() + WALK_S
    while time.perf_counter() < until and not raised:
        walk()


def test_objects_are_found_by_their_exact_type() -> None:
    class Derived(Marked):
        pass

    kept = [Marked(), Derived(), Marked()]
    assert sorted(map(id, live_objects([Marked]))) == sorted((id(kept[0]), id(kept[2])))
    assert len(live_objects([Marked, Derived])) == 3


def test_tuples_are_refused() -> None:
    with pytest.raises(ValueError, match="under construction"):
        live_objects([list, tuple])


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        live_objects([Marked])
        with alone():
            pass
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_a_plain_walk_breaks_threads_that_build_tuples() -> None:
    """The harm itself, so that the tests below cannot pass by looking at nothing."""
    with threads_that_build_tuples() as raised:
        repeat(lambda: [each for each in gc.get_objects() if type(each) is Marked], raised)
    assert raised
    assert isinstance(raised[0], SystemError)


def test_a_walk_harms_no_thread() -> None:
    with threads_that_build_tuples() as raised:
        repeat(lambda: live_objects([list, dict]), raised)
    assert not raised


UNDER_AN_AUDIT_HOOK = """
import sys
from flatout.measure.lines.live_objects import live_objects
from tests.unit.measure.lines.test_live_objects import repeat, threads_that_build_tuples

sys.addaudithook(lambda event, arguments: None)  # stays until the process ends
kept = [[] for _ in range(20_000)]
with threads_that_build_tuples() as raised:
    repeat(lambda: live_objects([list, dict]), raised)
sys.exit(repr(raised) if raised else 0)
"""


def test_a_walk_runs_no_audit_hook_that_lets_other_threads_run() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", UNDER_AN_AUDIT_HOOK], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_containers_tensors_and_holders_are_looked_up_without_harm() -> None:
    import torch

    user_code = UserCode(".")
    tensor = torch.ones(1, requires_grad=True) * 2
    kept = {"list": [tensor]}

    def look() -> None:
        holders.container_sizes()
        holders.tensors_with_graph()
        holders.held_by_python([tensor], user_code, frame=sys._getframe())
        holders.find_holder(tensor, user_code, ignored=[kept])

    with threads_that_build_tuples() as raised:
        repeat(look, raised)
    assert not raised


def test_nobody_else_runs_while_alone() -> None:
    num_turns = 0
    done = threading.Event()

    def count() -> None:
        nonlocal num_turns
        while not done.is_set():
            num_turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        interval_s = sys.getswitchinterval()
        with alone():
            before = num_turns
            until = time.perf_counter() + 10 * interval_s
            while time.perf_counter() < until:
                pass
            assert num_turns == before
        assert sys.getswitchinterval() == interval_s
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_no_garbage_is_collected_in_the_block_and_all_is_as_before_behind_it(was_enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with suppress(RuntimeError), without_collection():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()
