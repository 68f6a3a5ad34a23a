"""A job by its channel: rates between two readings, from this process and from another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatout.monitor.job.channel import find_channel
from flatout.monitor.job.job_meter import JobMeter
from tests.support.monitor_played import PlayedClock, PlayedJob


def test_figures_are_those_of_the_time_between_two_readings(tmp_path: Path) -> None:
    clock = PlayedClock()
    job = PlayedJob(tmp_path, clock)
    meter = JobMeter(job.folder)
    assert meter.read(clock.wall(), clock.now_s).missing == {"steps": "the job has not reported yet"}
    job.advance(steps=5, wait=1.0, rest=1.0)
    first = meter.read(clock.wall(), clock.now_s)
    assert (first.steps, first.step_s, first.phases) == (5, None, None)
    clock.now_s += 2.0
    job.advance(steps=10, wait=0.5, rest=1.0, device={"wait": 0.1, "rest": 0.9})
    second = meter.read(clock.wall(), clock.now_s)
    assert second.steps_per_s == pytest.approx(5.0)
    assert second.step_s == pytest.approx(0.15)  # half a second of the two was no part of a step
    assert second.samples_per_s == pytest.approx(160.0)
    assert second.phases is not None
    assert second.phases["wait"] == pytest.approx(1 / 3)
    assert second.device_phases is None  # the GPU's clock was not there at the first reading
    clock.now_s += 1.0
    job.advance(wait=0.1, rest=0.9, device={"wait": 0.2, "rest": 0.6})
    third = meter.read(clock.wall(), clock.now_s)
    assert third.device_phases is not None
    assert third.device_phases["wait"] == pytest.approx(0.25)


def test_phases_that_were_not_measured_are_not_zero(tmp_path: Path) -> None:
    clock = PlayedClock()
    job = PlayedJob(tmp_path, clock)
    meter = JobMeter(job.folder)
    for spent in ({"rest": 1.0}, {"rest": 1.0}, {"rest": 0.5, "forward": 0.5}, {"rest": 1.0}):
        clock.now_s += 1.0
        job.advance(device={"wait": 0.5, "rest": 0.5}, **spent)
        found = meter.read(clock.wall(), clock.now_s)
        if not job.host_s["forward"] and found.phases is not None:
            assert found.phases == {"wait": 0.0, "rest": 1.0}
    assert found.phases == {"wait": 0.0, "forward": 0.0, "rest": 1.0}  # measured once, it is a real zero
    assert found.device_phases == {"wait": 0.5, "rest": 0.5}


def test_a_span_without_a_step_has_no_rate_and_a_reason(tmp_path: Path) -> None:
    clock = PlayedClock()
    job = PlayedJob(tmp_path, clock)
    meter = JobMeter(job.folder)
    job.advance(wait=0.1, rest=0.1)
    meter.read(clock.wall(), clock.now_s)
    clock.now_s += 4.0
    sample = meter.read(clock.wall(), clock.now_s)
    assert (sample.steps_per_s, sample.since_step_s) == (None, 4.0)
    assert sample.missing["step_s"] == "no step ended in this span"


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_is_no_stall_and_no_rate(tmp_path: Path, jump_s: float) -> None:
    clock = PlayedClock()
    job = PlayedJob(tmp_path, clock)
    meter = JobMeter(job.folder)
    for _ in range(2):
        clock.now_s += 1.0
        job.advance(wait=0.1, rest=0.9)
        assert meter.read(clock.wall(), clock.now_s).since_step_s == 0.0
    steady_s = clock.now_s + 0.5
    clock.now_s += 0.5 + jump_s  # a job's record has the time that is set
    waiting = meter.read(clock.wall(), steady_s)
    assert waiting.since_step_s is not None and waiting.since_step_s < 3.0
    job.advance(wait=0.1, rest=0.4)
    stepped = meter.read(clock.wall(), steady_s)
    assert (stepped.steps_per_s, stepped.since_step_s) == (None, 0.0)
    clock.now_s += 1.0
    job.advance(wait=0.1, rest=0.9)
    assert meter.read(clock.wall(), steady_s + 1.0).steps_per_s == pytest.approx(1.0)


def test_waits_that_were_never_timed_are_unknown_and_not_zero(tmp_path: Path) -> None:
    clock = PlayedClock()
    job = PlayedJob(tmp_path, clock)
    job.scalars["sees_data"] = 0.0
    meter = JobMeter(job.folder)
    for _ in range(2):
        clock.now_s += 1.0
        job.advance(rest=1.0)
        sample = meter.read(clock.wall(), clock.now_s)
    assert sample.phases is None
    assert "flatout.watch(loader)" in sample.missing["phases"]
    assert sample.steps_per_s == pytest.approx(1.0)


def test_a_count_that_was_begun_again_is_no_negative_rate(tmp_path: Path) -> None:
    clock = PlayedClock()
    job = PlayedJob(tmp_path, clock)
    meter = JobMeter(job.folder)
    job.advance(steps=9, rest=1.0)
    meter.read(clock.wall(), clock.now_s)
    clock.now_s += 1.0
    job.scalars["steps"] = 0.0
    job.advance(steps=1, rest=1.0)
    assert meter.read(clock.wall(), clock.now_s).steps_per_s is None


JOB = """
import sys, pathlib
from flatout.monitor.job.watch import watch
watched = watch(iter(sys.stdin.readline, ''), line=False, history=False, folder=pathlib.Path(sys.argv[1]))
print('ready', flush=True)
for line in watched:
    watched.step(loss=float(line), samples=2)
    watched.run.reporter.write()
    print('stepped', flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists open files so")
def test_another_process_is_attached_by_its_number_through_its_whole_life(tmp_path: Path) -> None:
    command = [sys.executable, "-c", JOB, str(tmp_path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    channel = find_channel(child.pid)
    assert channel is not None
    meter = JobMeter(channel.parent)
    assert meter.pid == child.pid
    losses = []
    for loss in (0.5, 0.25):
        child.stdin.write(f"{loss}\n")
        child.stdin.flush()
        assert child.stdout.readline() == "stepped\n"
        losses.append(meter.read(time.time(), time.monotonic()).loss)
    assert losses == [0.5, 0.25]
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert meter.read(time.time(), time.monotonic()).state == "stopped"
    os.kill(child.pid, signal.SIGCONT)
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    after = meter.read(time.time(), time.monotonic())
    assert (after.state, after.loss, after.steps) == ("died", 0.25, 2)
