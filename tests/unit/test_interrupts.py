"""An interrupt ends the work at once, except where it would tear it."""

from __future__ import annotations

import signal
import threading

import pytest

from flatout.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_held_block_runs_to_its_end() -> None:
    done = []

    def work(interrupts: Interrupts) -> None:
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")
        done.append("not this")

    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            work(interrupts)
        with interrupts.held():
            done.append("the next")
    assert done == ["all of it", "the next"]


def test_an_error_in_a_held_block_comes_through() -> None:
    with Interrupts() as interrupts, pytest.raises(ZeroDivisionError), interrupts.held():
        raise ZeroDivisionError


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run() -> None:
        with Interrupts() as interrupts, interrupts.held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
