"""Workers are started, heard, interrupted and, when one dies, not waited for in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import psutil
import pytest

from flatout.engines.steering.workers.placement import GpuRoom, Placement
from flatout.engines.steering.workers.worker_processes import (
    SUPERVISED,
    EndedWorker,
    WorkerPlan,
    WorkerProcesses,
    plan_workers,
)


def gpu(name: str) -> GpuRoom:
    return GpuRoom(name=f"GPU-{name}", free_bytes=0)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def plans(*arguments: str) -> list[WorkerPlan]:
    return [
        WorkerPlan(name=str(number), environment={"NUMBER": str(number)}, arguments=(argument,))
        for number, argument in enumerate(arguments)
    ]


def run(code: str, made: Sequence[WorkerPlan]) -> tuple[list[EndedWorker], list[str]]:
    said: list[str] = []
    with WorkerProcesses(python(code), made, on_progress=said.append) as workers:
        return workers.wait(), said


def test_each_sees_its_own_gpus_and_cores() -> None:
    second, third = plan_workers(
        Placement(replicas=((gpu("a"),), (gpu("b"),), (gpu("c"), gpu("d")))), cores=8
    )
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert second.arguments == ("--device", "cuda", "--worker", "1")
    assert "OMP_NUM_THREADS" not in second.environment
    assert third.environment["CUDA_VISIBLE_DEVICES"] == "GPU-c,GPU-d"
    cpus = plan_workers(Placement(replicas=((), (), ())), cores=8)
    assert [plan.environment["OMP_NUM_THREADS"] for plan in cpus] == ["2", "2"]
    assert [plan.arguments for plan in cpus] == [("--device", "cpu", "--worker", str(i)) for i in (1, 2)]
    assert all(plan.environment[SUPERVISED] == "1" for plan in cpus)
    assert plan_workers(Placement(replicas=((gpu("a"),),)), cores=8) == []


def test_what_workers_say_is_relayed_with_their_names() -> None:
    code = "import os, sys; print(f'flatout: {os.environ[\"NUMBER\"]} {sys.argv[1]}', file=sys.stderr)"
    ended, said = run(code, plans("a", "b"))
    assert ended == [EndedWorker(name="0", code=0), EndedWorker(name="1", code=0)]
    assert {"worker 0: 0 a", "worker 1: 1 b"} <= set(said)


def test_one_that_is_killed_is_told_of_and_the_rest_count() -> None:
    code = "import os, sys\nif sys.argv[1] == 'dies': os.kill(os.getpid(), 9)"
    ended, said = run(code, plans("dies", "lives"))
    assert [one.code for one in ended] == [-9, 0]
    assert "worker 0 ended: killed by SIGKILL; another worker takes over its trials" in said


WAITING = "import sys, threading\nprint('waiting', file=sys.stderr, flush=True)\nthreading.Event().wait()"
STARTER = f"""
from flatout.engines.steering.workers.worker_processes import WorkerPlan, WorkerProcesses
import sys
child = {WAITING!r}
plans = [WorkerPlan(name="w", environment={{}})]
command = [sys.executable, "-c", child]
with WorkerProcesses(command, plans, on_progress=lambda line: print(line, flush=True)) as workers:
    workers.wait()
"""


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if text in line:
            return lines
    raise AssertionError(lines)


def test_an_interrupt_reaches_the_workers_and_ends_them() -> None:
    process = subprocess.Popen(python(STARTER), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = lines_until(process, "worker w: waiting")
    pid = int(said[0].rpartition(" ")[2])
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert stdout == ""  # where the worker was is not told
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=60)  # whoever adopted it takes it down


SUPERVISED_CHILD = """
import sys, threading
from flatout.engines.steering.workers.worker_processes import end_with_starter
end_with_starter()
try:
    print("ready", flush=True)
    threading.Event().wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


IGNORED = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # as a shell begins `command &`


@pytest.mark.parametrize("begin", ["", IGNORED], ids=["as usual", "interrupts ignored"])
def test_a_worker_ends_when_its_starter_is_gone(begin: str) -> None:
    child = subprocess.Popen(
        python(begin + SUPERVISED_CHILD),
        env={**os.environ, SUPERVISED: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines_until(child, "ready")
    stdout, _ = child.communicate()  # closes its standard input
    assert stdout == "interrupted\n"
    assert child.returncode == 0
