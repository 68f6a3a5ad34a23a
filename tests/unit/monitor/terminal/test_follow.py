"""Samples as lines for people and as documents for programs."""

from __future__ import annotations

import io
import json
import os
import signal
from dataclasses import replace

from flatout.monitor.past.playback import Playback
from flatout.monitor.sample import Sample
from flatout.monitor.terminal.follow import Documents, Lines, follow_live, follow_replay, write_lines
from flatout.monitor.terminal.keyboard import Keyboard
from tests.support.monitor import story
from tests.support.monitor_played import Played, PlayedClock, played_gpu


def written(samples: tuple[Sample, ...], writer: type[Lines] | type[Documents]) -> list[str]:
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
    lines = written(samples, Documents)
    assert [Sample.from_json(json.loads(line)) for line in lines] == list(samples)


def test_lines_end_with_the_job() -> None:
    samples = story(seconds=5)
    last = samples[-1]
    assert last.job is not None
    ended = replace(last, time_s=last.time_s + 1, job=replace(last.job, state="died"))
    assert len(written((*samples, ended), Documents)) == 6


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
