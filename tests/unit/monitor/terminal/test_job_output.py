"""The job's prints and the live line on one terminal: neither is appended to the other, nor erased by it."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys

import pytest

from flatout.monitor.terminal.job_output import JobOutput


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_wipe_comes_before_each_text() -> None:
    stream, wiped = Terminal(), list[str]()
    output = JobOutput(lambda: wiped.append(stream.getvalue()))
    output.hear(stream)
    output.hear(stream)  # heard once all the same
    print("epoch", 0, file=stream)
    print(end="", file=stream)
    assert stream.getvalue() == "epoch 0\n"
    assert wiped == ["", "epoch", "epoch ", "epoch 0"]
    output.write_unheard(stream, "x")
    assert len(wiped) == 4


@pytest.mark.parametrize(
    ("text", "is_mid_line"), [("a\n", False), ("a", True), ("a\nb", True), ("\r10 %", False)]
)
def test_a_line_is_the_jobs_until_it_ends_it_or_draws_it_again(text: str, is_mid_line: bool) -> None:
    stream = Terminal()
    output = JobOutput(lambda: None)
    output.hear(stream)
    stream.write(text)
    assert output.is_mid_line is is_mid_line


def test_the_streams_get_their_own_write_back() -> None:
    stream = Terminal()
    output = JobOutput(lambda: pytest.fail("the job was heard after the end"))
    output.hear(stream)
    output.close()
    print("afterwards", file=stream)
    assert "write" not in vars(stream)
    assert stream.getvalue() == "afterwards\n"


def test_a_stand_in_of_somebody_else_is_left_to_him() -> None:
    stream, heard = Terminal(), list[str]()
    output = JobOutput(lambda: None)
    output.hear(stream)
    vars(stream)["write"] = heard.append
    output.close()
    stream.write("his")
    assert heard == ["his"]


def test_what_is_no_terminal_or_takes_no_attribute_is_left_alone() -> None:
    class Bare:
        __slots__ = ()

        def isatty(self) -> bool:
            return True

    output = JobOutput(lambda: None)
    log = io.StringIO()
    for stream in (None, log, Bare()):
        output.hear(stream)  # type: ignore[arg-type]
    assert "write" not in vars(log)


def test_a_forked_process_prints_whoever_holds_the_lock() -> None:
    """A worker is forked while the line is being drawn: the thread that would free the lock is not in it."""
    user, program = os.openpty()
    try:
        with os.fdopen(program, "w") as stream:
            output = JobOutput(lambda: None)
            output.hear(stream)
            with output.lock:
                worker = multiprocessing.get_context("fork").Process(
                    target=print, args=("from the worker",), kwargs={"file": stream, "flush": True}
                )
                worker.start()
                worker.join(timeout=20)
            assert worker.exitcode == 0
            assert os.read(user, 100).decode().strip() == "from the worker"
    finally:
        os.close(user)


def test_pythons_own_streams_can_be_heard() -> None:
    assert hasattr(sys.__stdout__, "__dict__")
