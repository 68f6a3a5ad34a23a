"""Processes of a GPU and of the job; a number that two systems give to two processes is not mixed up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil

from flatout.hardware.nvml_questions import Questions
from flatout.monitor.meters.processes import MOST_ROWS, ProcessMeter, children, processes_of_gpu
from flatout.monitor.sample import ProcessSample
from flatout.testing.played_nvml import PlayedGpu, PlayedNvml


def row(pid: int, name: str | None, memory_bytes: int | None = 5) -> ProcessSample:
    return ProcessSample(pid=pid, gpu_index=0, name=name, gpu_memory_bytes=memory_bytes, sm_share=0.5)


def test_rows_join_memory_and_shares() -> None:
    gpu = PlayedGpu()
    used = [
        SimpleNamespace(pid=433, smUtil=share, timeStamp=at) for share, at in ((90, 5), (40, 11), (60, 12))
    ]
    gpu.answers["nvmlDeviceGetProcessUtilization"] = used
    (found,) = processes_of_gpu(Questions(PlayedNvml(gpu), gpu), 2, None, since_us=10)
    assert (found.pid, found.gpu_index, found.name) == (433, 2, "python3")
    assert (found.gpu_memory_bytes, found.sm_share) == (641728512, 0.5)


def test_a_gpu_that_tells_nothing_has_no_rows() -> None:
    gpu = PlayedGpu(answers={})
    assert list(processes_of_gpu(Questions(PlayedNvml(gpu), gpu), 0, None, since_us=0)) == []


def test_the_operating_system_is_believed_only_where_the_names_agree() -> None:
    pid = os.getpid()
    own = psutil.Process(pid).name()
    meter = ProcessMeter()
    (same,) = meter.read([row(pid, own)], 1.0)
    assert same.memory_bytes is not None and same.memory_bytes > 0
    (other,) = meter.read([row(pid, "/usr/bin/another")], 2.0)
    assert (other.name, other.memory_bytes, other.cpu_cores) == ("another", None, None)
    (nameless,) = meter.read([row(pid, None)], 3.0)
    assert nameless.memory_bytes is None


def test_the_job_and_its_children_have_rows_without_a_gpu() -> None:
    meter = ProcessMeter(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        rows = {sample.pid: sample for sample in meter.read([], 1.0)}
        assert rows[os.getpid()].of_job
        assert rows[os.getpid()].cpu_cores is None  # a share needs two readings
        if Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
            assert child.pid in children(os.getpid())
            assert rows[child.pid].gpu_index is None
        again = {sample.pid: sample for sample in meter.read([], 2.0)}
        assert again[os.getpid()].cpu_cores is not None
        child.communicate(b"\n")
    assert child.pid not in {sample.pid for sample in meter.read([], 3.0)}


def test_a_process_that_is_gone_keeps_what_nvml_said() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (found,) = ProcessMeter().read([row(child.pid, "python3")], 1.0)
    assert (found.name, found.gpu_memory_bytes, found.memory_bytes) == ("python3", 5, None)


def test_rows_are_bounded_and_the_largest_are_kept() -> None:
    rows = ProcessMeter().read([row(10**8 + n, "x", n) for n in range(500)], 1.0)
    assert len(rows) == MOST_ROWS
    assert rows[0].gpu_memory_bytes == 499
