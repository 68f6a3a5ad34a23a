"""A line under what a job writes: always there, never in the job's text, away while the terminal is read."""

from __future__ import annotations

import builtins
import io
import multiprocessing
import os
import sys
import termios
import threading
from collections.abc import Iterator

import pytest

from flatout.monitor.terminal.standing_line import HookedLock, Row, StandingLine, is_taken
from tests.support.screen import Screen

LINE = "CPU 45 % | RAM 67 % | loss 0.3245 | lr 5.2e-05 | 12.3 it/s"  # longer than what the job prints


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def print(self, *words: object, end: str = "\n") -> None:
        print(*words, end=end, file=self, flush=True)

    @property
    def rows(self) -> list[str]:
        return Screen().feed(self.getvalue())

    @property
    def last(self) -> str:
        return [row for row in self.rows if row][-1]


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def line(terminal: Terminal) -> Iterator[StandingLine]:
    standing = StandingLine()
    standing.show(terminal, LINE)
    yield standing
    standing.close()


def test_the_line_is_there_after_every_print(terminal: Terminal, line: StandingLine) -> None:
    looks = []
    for step in range(60):
        terminal.print("step", step)
        looks.append(terminal.last == LINE)
    assert sum(looks) == 60
    assert terminal.rows[:-1] == [f"step {step}" for step in range(60)]


def test_a_row_that_has_begun_is_the_jobs(terminal: Terminal, line: StandingLine) -> None:
    terminal.print(" ", "loading", end="")
    line.show(terminal, LINE)
    assert terminal.rows == ["  loading"]
    terminal.print(" done")
    assert terminal.rows == ["  loading done", LINE]
    line.close()
    terminal.print("afterwards")
    assert terminal.rows == ["  loading done", LINE, "afterwards", ""]


def test_below_a_row_that_the_job_draws_again(terminal: Terminal, line: StandingLine) -> None:
    for percent in (10, 20):
        terminal.print(f"\r{percent} %", end="")
        assert terminal.rows == [f"{percent} %", LINE]
    terminal.print("30 %", end="\r")
    line.show(terminal, "CPU 46 %")
    terminal.print()
    assert terminal.rows == ["20 %30 %", "CPU 46 %"]


@pytest.mark.parametrize("is_heard_first", [True, False])
def test_bars_of_tqdm_come_and_go_and_leave_nothing(
    terminal: Terminal, line: StandingLine, is_heard_first: bool
) -> None:
    """As `tqdm.write` between two epochs meets it: no bar is there, and none was cleared for it."""
    tqdm = pytest.importorskip("tqdm").tqdm
    if not is_heard_first:
        line.close(leaves_line=False)  # the bar is older than the line
    for epoch in range(2):
        with tqdm(total=4, file=terminal, mininterval=0, ncols=40, desc="train") as bar:
            for _ in range(4):
                line.show(terminal, LINE)
                bar.update()
                assert terminal.last == LINE
                if bar.n == 2:
                    with tqdm(total=1, file=terminal, leave=False, ncols=40, desc="inner") as inner:
                        inner.update()
                        assert terminal.last == LINE
            tqdm.write(f"epoch {epoch} is nearly done", file=terminal)
        tqdm.write(f"epoch {epoch} done", file=terminal)
        terminal.print("saved")
        assert terminal.last == LINE
    line.close()
    kept = [row[:11] if row.startswith("train") else row for row in terminal.rows if row]
    assert kept == [
        *("epoch 0 is nearly done", "train: 100%", "epoch 0 done", "saved"),
        *("epoch 1 is nearly done", "train: 100%", "epoch 1 done", "saved", LINE),
    ]
    assert not isinstance(tqdm._lock, HookedLock)


def test_a_sentence_stands_above_the_line(terminal: Terminal, line: StandingLine) -> None:
    line.say(terminal, "flatout: a listener failed")
    assert terminal.rows == ["flatout: a listener failed", LINE]


@pytest.mark.parametrize("name", ["readline", "read"])
def test_it_is_away_while_the_terminal_is_read(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen = []

    class Keys(Terminal):
        def readline(self, *_: int) -> str:  # type: ignore[override]
            line.show(terminal, LINE)
            seen.append(terminal.rows)
            io.StringIO.write(terminal, "yes\n")  # as the terminal shows what is typed
            return "yes\n"

        read = readline

    keys = Keys()
    monkeypatch.setattr("sys.stdin", keys)
    monkeypatch.setattr("sys.stdout", terminal)
    line = StandingLine()
    line.show(terminal, LINE)
    terminal.print("go on? ", end="")
    assert getattr(keys, name)() == "yes\n"
    assert seen == [["go on?"]]
    assert terminal.rows == ["go on? yes", LINE]
    assert builtins.input("again? ") == "yes"
    assert seen[-1] == ["go on? yes", "again?"]
    line.close()
    assert builtins.input.__class__.__name__ == "builtin_function_or_method"
    assert "readline" not in vars(keys)


def test_a_terminal_without_echo_or_of_another_job_is_taken() -> None:
    user, program = os.openpty()
    with os.fdopen(program, "w") as stream:
        assert not is_taken(stream)
        for flag in (termios.ECHO, termios.ICANON):
            own = termios.tcgetattr(program)
            changed = [*own]
            changed[3] &= ~flag
            termios.tcsetattr(program, termios.TCSANOW, changed)
            assert is_taken(stream)
            line = StandingLine()
            line.show(stream, LINE)  # a password is typed: nothing is drawn
            line.close()
            termios.tcsetattr(program, termios.TCSANOW, own)
        stream.write("x")
        stream.flush()
        assert os.read(user, 100) == b"x"
    os.close(user)


def test_a_password_is_asked_for_on_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for one sets the mode of the terminal, then writes the prompt past every stream of Python."""
    user, program = os.openpty()
    own = termios.tcsetattr
    with os.fdopen(program, "w") as stream, os.fdopen(os.dup(program)) as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        line = StandingLine()
        line.show(stream, LINE)
        mode = termios.tcgetattr(program)
        silent = [*mode]
        silent[3] &= ~termios.ECHO
        termios.tcsetattr(program, termios.TCSANOW, silent)
        os.write(program, b"Password: ")
        line.show(stream, LINE)
        os.write(program, b"!")
        written = b""
        while not written.endswith(b"!"):  # a terminal hands over what was written piece by piece
            written += os.read(user, 1000)
        assert Screen().feed(written.decode()) == ["Password: !"]
        termios.tcsetattr(program, termios.TCSANOW, mode)
        line.close()
        assert termios.tcsetattr is own
    os.close(user)


@pytest.mark.parametrize(
    ("texts", "is_free", "is_redrawn"),
    [
        (["a\n"], True, False),
        (["a"], False, False),
        ([" "], False, False),
        (["a\nb"], False, False),
        (["\r10 %"], False, True),
        (["10 %\r"], False, True),
        (["\r10 %", "\r    ", "\r"], True, True),
        (["10 %", "\r\x1b[K"], True, True),
        (["\x1b[2A"], False, False),
        (["\x1b[31m"], True, False),
    ],
)
def test_what_is_on_the_row_of_the_cursor(texts: list[str], is_free: bool, is_redrawn: bool) -> None:
    row = Row()
    for text in texts:
        row.take(text)
    assert (row.is_free, row.is_redrawn) == (is_free, is_redrawn)


def test_the_streams_get_their_own_write_back(terminal: Terminal, line: StandingLine) -> None:
    line.close()
    assert "write" not in vars(terminal)


def test_a_stand_in_of_somebody_else_is_left_to_him(terminal: Terminal, line: StandingLine) -> None:
    heard: list[str] = []
    ours = terminal.write
    vars(terminal)["write"] = lambda text: heard.append(text) or ours(text)
    terminal.print("his")
    line.show(terminal, LINE)
    line.close()
    terminal.write("his too")
    assert "".join(heard) == "his\nhis too"


def test_what_is_no_terminal_or_takes_no_attribute_is_left_alone() -> None:
    class Bare:
        __slots__ = ()
        closed = False

        def isatty(self) -> bool:
            return True

    line = StandingLine()
    log = io.StringIO()
    for stream in (None, log, Bare()):
        line.listen(stream)  # type: ignore[arg-type]
    line.close()
    assert "write" not in vars(log)


def test_a_forked_process_prints_whoever_holds_the_lock() -> None:
    """A worker is forked while the line is being drawn: the thread that would free the lock is not in it."""
    user, program = os.openpty()
    try:
        with os.fdopen(program, "w") as stream:
            line = StandingLine()
            line.listen(stream)
            with line._lock:
                worker = multiprocessing.get_context("fork").Process(
                    target=print, args=("from the worker",), kwargs={"file": stream, "flush": True}
                )
                worker.start()
                worker.join(timeout=20)
            line.close()
            assert worker.exitcode == 0
            assert os.read(user, 100).decode().strip() == "from the worker"
    finally:
        os.close(user)


def test_a_lock_that_was_not_got_changes_nothing_and_travels_as_itself() -> None:
    calls: list[str] = []
    lock = HookedLock(threading.Lock(), lambda: calls.append("before"), lambda: calls.append("after"))
    with lock:
        assert not lock.acquire(blocking=False)
    assert calls == ["before", "after"]
    make, parts = HookedLock("its own", print, print).__reduce__()  # as a worker is given it
    assert make(*parts) == "its own"


def test_pythons_own_streams_can_be_heard() -> None:
    assert hasattr(sys.__stdout__, "__dict__")
