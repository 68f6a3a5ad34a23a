"""Whose job is watched: one that reports, one that does not, the latest, or none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.ground.runs import list_runs, read_run, state_of
from flatout.monitor.job.job_meter import JobMeter
from flatout.monitor.job.watch import end_watching, watch
from flatout.monitor.open_sampler import MACHINE, folder_of, latest_job, open_sampler
from flatout.monitor.past.history import replay
from flatout.monitor.sinks.choice import SinkChoice
from tests.support.monitor import kept_run, story


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    monkeypatch.setenv("FLATOUT_RUNS", str(folder))
    return folder


def test_the_latest_job_that_runs_is_found(runs: Path) -> None:
    assert latest_job() is None
    kept_run(runs, story(seconds=2), pid=1, ended=True)
    kept_run(runs, story(seconds=2), pid=os.getpid(), ended=False)  # it has no channel: it is no job
    assert latest_job() is None
    watched = watch(range(3), name="mine", line=False)
    try:
        found = latest_job()
        assert found is not None and found == watched.folder
    finally:
        end_watching()
    assert latest_job() is None


def test_a_process_that_reports_is_met_at_its_channel(tmp_path: Path, runs: Path) -> None:
    code = (
        "import flatout; watch = flatout.watch(range(3), line=False); print(list(watch), flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"[0, 1, 2]\n"
        folder = folder_of(child.pid, tmp_path / "scratch")
        assert folder.parent == runs and read_run(folder).pid == child.pid
        assert not (tmp_path / "scratch").exists()
    finally:
        child.communicate(b"\n")


def test_a_launcher_is_watched_at_the_first_rank_that_it_started(tmp_path: Path, runs: Path) -> None:
    job = "import flatout, os; list(flatout.watch(range(3), line=False))\n"
    job += "os.write(1, b'reported\\n'); input()"  # one call for the line: two processes share the pipe
    launcher = (
        "import os, subprocess, sys\n"
        "for rank in '10':\n"
        "    environment = {**os.environ, 'RANK': rank, 'WORLD_SIZE': '2'}\n"
        "    subprocess.Popen([sys.executable, '-c', sys.argv[1]], env=environment)\n"
        "input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", launcher, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    )
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"reported\n"] * 2
        folder = folder_of(process.pid, tmp_path / "scratch")
        run = read_run(folder)
        assert (folder.parent, run.rank) == (runs, 0)
        assert run.pid != process.pid
    finally:
        process.communicate(b"\n\n\n")


def test_any_process_can_be_watched(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"},
    )
    try:
        with open_sampler(pid=child.pid) as sampler:
            sample = sampler.take()
        assert sample.job is not None
        assert (sample.job.pid, sample.job.state) == (child.pid, "running")
        assert sample.job.steps is None and "not reported" in sample.job.missing["steps"]
        assert any(process.pid == child.pid and process.of_job for process in sample.processes)
        meter = JobMeter(folder_of(child.pid, tmp_path))
        assert meter.run.visible_devices == "1"
    finally:
        child.communicate(b"\n")
    assert meter.read(0.0, 0.0).state == "ended"  # it does not report: nothing says that it died
    for number in (child.pid, -5):
        with pytest.raises(BadInput, match=f"process {number} is not running"):
            folder_of(number, tmp_path)


def test_a_log_is_kept_where_one_is_asked_for(tmp_path: Path) -> None:
    notes: list[str] = []
    with open_sampler(log=tmp_path / "kept", on_progress=notes.append) as sampler:
        sampler.take()
        sampler.take()
    ((folder, run),) = list_runs(tmp_path / "kept")
    assert run.name == MACHINE and run.ended_s is not None
    assert len(list(replay(folder))) == 2
    assert notes == [f"the log is kept in {folder}"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_viewer_that_is_ended_by_a_signal_has_ended_and_not_died(
    tmp_path: Path, number: signal.Signals
) -> None:
    def view() -> None:
        with open_sampler(log=tmp_path / "kept") as sampler:
            sampler.take()
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt):
        view()
    ((folder, run),) = list_runs(tmp_path / "kept")
    assert state_of(run) == "ended"
    assert len(list(replay(folder))) == 1


def test_the_log_of_a_process_is_its_own_run(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with open_sampler(pid=process.pid, log=tmp_path) as sampler:
            sampler.take()
        ((folder, _),) = list_runs(tmp_path)
        assert read_run(folder).pid == process.pid
        assert len(list(replay(folder))) == 1
        process.communicate(b"\n")


def test_sinks_hear_every_sample_and_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "samples.jsonl"
    with open_sampler(sinks=SinkChoice(jsonl=str(path))) as sampler:
        sampler.take()
    assert json.loads(path.read_text())["format"] == "flatout-sample"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BadInput, match="cannot hold a log"), open_sampler(log=blocked / "runs"):
        raise AssertionError("it must not begin")


def test_a_rate_out_of_range_is_refused() -> None:
    with pytest.raises(BadInput, match="samples per second"), open_sampler(hz=1000):
        raise AssertionError("it must not begin")
