"""An interrupt ends the work at once, except where it would tear it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from flatout.ground.interrupts import Interrupts, Terminated


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_the_loss_of_the_terminal_is_one_where_asked_for_and_not_ignored() -> None:
    with pytest.raises(Terminated), Interrupts(hangup=True):
        signal.raise_signal(signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(hangup=True):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_loop_that_asks_is_told_and_a_second_signal_ends_it_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts(ask=True) as interrupts:
        assert not interrupts.came
        signal.raise_signal(number)
        assert interrupts.came
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_nothing_is_raised_before_the_release_and_a_kill_is_told_from_a_key() -> None:
    with Interrupts(hold=True) as interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.came
        with pytest.raises(Terminated):
            interrupts.release()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.hold()
        signal.raise_signal(signal.SIGINT)
        interrupts.hold()
        with pytest.raises(KeyboardInterrupt):
            interrupts.release()


def test_what_is_still_held_at_the_end_is_raised_there() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts(hold=True):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), Interrupts(hold=True):
        raise ZeroDivisionError(signal.raise_signal(signal.SIGINT))


def test_an_interrupt_that_comes_too_early_is_held_until_the_job_is_known() -> None:
    """Between starting a process and knowing it, an exception would leave it running."""
    with Interrupts(hold=True) as signals:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signals.release()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        signals.hold()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_during_the_clean_up_comes_after_it() -> None:
    cleaned: list[int] = []

    def clean() -> None:
        with Interrupts(hold=True):
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(1)

    with pytest.raises(KeyboardInterrupt):
        clean()
    assert cleaned
