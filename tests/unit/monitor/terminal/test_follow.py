"""Samples as lines for people and as documents for programs."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import termios
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TextIO

import pytest
from rich.console import Console

from flatout.monitor.past.playback import Playback
from flatout.monitor.sample import Sample
from flatout.monitor.terminal.follow import (
    ENDED_BY_SIGNAL,
    Lines,
    LiveSource,
    Writer,
    documents,
    follow_live,
    follow_replay,
    obey,
    show,
    write_lines,
)
from flatout.monitor.terminal.keyboard import Keyboard
from tests.support.monitor import story
from tests.support.monitor_played import Played, PlayedClock, played_gpu


def written(samples: tuple[Sample, ...], writer: Callable[[TextIO], Writer]) -> list[str]:
    clock = PlayedClock()
    stream = io.StringIO()
    source = Playback(samples, speed=1e12, clock=clock)
    clock.now_s += 1.0
    assert follow_replay(source, on_screen=False, title="", write=writer(stream)) == 0
    return stream.getvalue().splitlines()


def test_a_line_per_sample_and_a_verdict_when_it_changes() -> None:
    lines = written(story(seconds=60, wait=0.03, late_wait=0.9), Lines)
    verdicts = [line for line in lines if line.startswith("verdict: ")]
    assert len(lines) - len(verdicts) == 60
    assert "is the limit, as it should be" in verdicts[0]
    assert "the loader is too slow" in verdicts[-1]
    assert len(verdicts) == 2
    assert lines[0].startswith("GPU 61.") and "it/s" in lines[0]


def test_what_happened_is_noted_below_its_line() -> None:
    samples = story(seconds=5)
    lost = replace(samples[2], notes=("GPU 1 is lost",))
    lines = written((*samples[:2], lost, *samples[3:]), Lines)
    assert lines[3] == "note: GPU 1 is lost"


def test_the_missing_driver_is_told_once() -> None:
    lines = written(story(seconds=20, gpus=False), Lines)
    assert [line for line in lines if "no GPU" in line] == [
        "no GPU: no NVIDIA driver: the NVML library is not on this machine"
    ]


def test_every_document_is_a_sample() -> None:
    samples = story(seconds=5)
    lines = written(samples, documents)
    assert [Sample.from_json(json.loads(line)) for line in lines] == list(samples)


def test_lines_end_with_the_job() -> None:
    samples = story(seconds=5)
    last = samples[-1]
    assert last.job is not None
    ended = replace(last, time_s=last.time_s + 1, job=replace(last.job, state="died"))
    assert len(written((*samples, ended), documents)) == 6


def test_a_signal_ends_lines_with_its_number(played: Played) -> None:
    sampler = played.sampler()

    def write(samples: tuple[Sample, ...]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert follow_live(sampler, on_screen=False, write=write) == 128 + signal.SIGTERM


def test_lines_of_a_live_sampler_come_as_they_are_taken(played: Played) -> None:
    played.gpus = [played_gpu(played.clock)]
    sampler = played.sampler(hz=10.0)
    seen = []

    def write(samples: tuple[Sample, ...]) -> None:
        seen.append(samples[-1])
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGHUP)

    assert follow_live(sampler, on_screen=False, write=write) == 128 + signal.SIGHUP
    assert len(seen) == 2
    assert seen[0].gpus


def test_nothing_is_asked_of_a_terminal() -> None:
    source = Playback(story(seconds=2), speed=1e12)
    with Keyboard(None) as keyboard:
        assert write_lines(source, keyboard, write=lambda samples: None) == 0


# The view in a real pseudo-terminal: drawn, obeyed, and gone without a trace


SAMPLES = story(seconds=30)
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Scripted:
    """A source that types a key, or does something else, each time it is asked."""

    def __init__(self, user: int, *typed: bytes | signal.Signals | type[BaseException]) -> None:
        self._user, self._typed = user, list(typed)

    @property
    def wait_s(self) -> float | None:
        return 10.0

    @property
    def is_over(self) -> bool:
        return False

    def advance(self) -> Sequence[Sample]:
        deed = self._typed.pop(0) if self._typed else b"q"
        if isinstance(deed, bytes):
            os.write(self._user, deed)
        elif isinstance(deed, signal.Signals):
            os.kill(os.getpid(), deed)
        else:
            raise deed
        return SAMPLES[-1:]

    def recent(self) -> tuple[Sample, ...]:
        return SAMPLES


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    user, program = pty.openpty()
    yield user, program
    os.close(user)
    os.close(program)


def watch(
    terminal: tuple[int, int], *typed: bytes | signal.Signals | type[BaseException], title: str = ""
) -> tuple[int, str]:
    """The exit code and all that was written to the screen."""
    user, program = terminal
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=90, height=30, color_system=None)
    try:
        with Keyboard(program) as keyboard:
            return show(Scripted(user, *typed), keyboard, console=console, title=title), stream.getvalue()
    finally:
        text = stream.getvalue()
        assert text.count(ENTER) == text.count(LEAVE) == 1
        assert text.rindex(SHOW) > text.rindex(HIDE)
        assert termios.tcgetattr(program)[3] & termios.ECHO


def test_it_draws_and_ends_with_a_key(terminal: tuple[int, int]) -> None:
    code, text = watch(terminal, b"q", title="replay")
    assert code == 0
    assert "pid 4711" in text and "replay" in text and "GPU 0 SM" in text


def test_keys_change_the_picture(terminal: tuple[int, int]) -> None:
    _, text = watch(terminal, b"s", b"\t", b"q")
    assert "sort: GPU memory" in text and "sort: SM" in text
    assert "> 1" in text


def test_a_held_picture_asks_for_nothing_more(terminal: tuple[int, int]) -> None:
    """The source types in its advance: held, it is not asked, so what ends the view was typed before."""
    code, text = watch(terminal, b" q")
    assert code == 0
    assert text.count("pid 4711") >= 1


def test_ctrl_c_is_raised_between_frames(terminal: tuple[int, int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        watch(terminal, signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_it_with_their_number(terminal: tuple[int, int], number: signal.Signals) -> None:
    assert watch(terminal, number)[0] == ENDED_BY_SIGNAL + number


def test_a_resized_terminal_is_drawn_again(terminal: tuple[int, int]) -> None:
    assert watch(terminal, signal.SIGWINCH)[0] == 0


def test_an_error_leaves_the_terminal_whole(terminal: tuple[int, int]) -> None:
    with pytest.raises(ZeroDivisionError):
        watch(terminal, b"s", ZeroDivisionError)


def test_a_stop_is_handed_on() -> None:
    asked = []
    with Keyboard(None) as keyboard:
        keyboard.signals += [signal.SIGTSTP, signal.SIGWINCH]
        assert obey(keyboard, lambda: asked.append("stop")) is None
    assert asked == ["stop"]
    assert keyboard.signals == []


def test_a_live_source_gives_each_sample_once(played: Played) -> None:
    played.gpus = [played_gpu(played.clock)]
    sampler = played.sampler()
    source = LiveSource(sampler)
    assert source.advance() == ()
    taken = sampler.take()
    assert source.advance() == (taken,)
    assert source.advance() == ()
    assert source.recent() == (taken,)
    assert source.wait_s is None and not source.is_over
