"""Keys of a real pseudo-terminal: names, echo, what is put back, and what ends a wait."""

from __future__ import annotations

import os
import pty
import signal
import termios
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor.terminal.keyboard import Keyboard, names_of, standard_input


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """(the user's end, the program's end)"""
    user, program = pty.openpty()
    yield user, program
    os.close(user)
    os.close(program)


def echoes(terminal: int) -> bool:
    return bool(termios.tcgetattr(terminal)[3] & termios.ECHO)


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        (b"q", ["q"]),
        (b"sp?", ["s", "p", "?"]),
        (b"\t\x1b[Z", ["next", "previous"]),
        (b"\x1b[A\x1b[B\x1b[C\x1b[D", ["previous", "next", "next", "previous"]),
        (b"\x1bOC", ["next"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[15~q", ["q"]),  # a function key means nothing, and nothing of it is taken for letters
        (b"\x1b[200~", []),
        (" é".encode(), ["space", "é"]),
        (b"\x01\x7f", []),
    ],
)
def test_what_is_typed_has_a_name(typed: bytes, names: list[str]) -> None:
    assert names_of(typed) == names


@given(st.binary(max_size=64))
def test_any_bytes_are_survived(data: bytes) -> None:
    assert all(name and name.isprintable() for name in names_of(data))


def test_keys_arrive_without_echo_and_the_terminal_is_put_back(terminal: tuple[int, int]) -> None:
    user, program = terminal
    assert echoes(program)
    with Keyboard(program) as keyboard:
        assert not echoes(program)
        os.write(user, b"s\t")
        assert keyboard.wait(10) == ["s", "next"]
    assert echoes(program)


def test_an_error_puts_the_terminal_back_too(terminal: tuple[int, int]) -> None:
    _, program = terminal
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), Keyboard(program):
        raise ZeroDivisionError
    assert echoes(program)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_ends_the_wait_and_is_noted_not_raised(terminal: tuple[int, int]) -> None:
    _, program = terminal
    with Keyboard(program) as keyboard:
        os.kill(os.getpid(), signal.SIGTERM)
        assert keyboard.wait(10) == []
        assert keyboard.signals == [signal.SIGTERM]


def test_another_thread_ends_the_wait() -> None:
    with Keyboard(None) as keyboard:
        thread = threading.Thread(target=keyboard.wake)
        thread.start()
        assert keyboard.wait(10) == []
        thread.join()
        keyboard.wake()
    keyboard.wake()  # after the end it is nobody's business


def test_a_deadline_ends_the_wait() -> None:
    with Keyboard(None) as keyboard:
        assert keyboard.wait(0.0) == []


def test_a_terminal_that_hung_up_is_noted() -> None:
    user, program = pty.openpty()
    with Keyboard(program) as keyboard:
        os.close(user)
        assert keyboard.wait(10) == []
        assert signal.SIGHUP in keyboard.signals
    os.close(program)


def test_standard_input_of_a_test_is_no_terminal() -> None:
    assert standard_input() is None
