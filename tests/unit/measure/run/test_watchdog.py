from __future__ import annotations

import threading

from flatout.measure.run.watchdog import Watchdog

NEVER_S = 60.0


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
