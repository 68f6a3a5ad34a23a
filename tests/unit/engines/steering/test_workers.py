"""Workers are started, heard, interrupted and, when one dies, not waited for in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from flatout.engines.steering.placement import Placement
from flatout.engines.steering.workers import SUPERVISED, Ended, WorkerPlan, plan_workers, run_workers
from flatout.errors import ChildDied


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def plans(*arguments: str) -> list[WorkerPlan]:
    return [
        WorkerPlan(name=f"worker {number}", environment={"NUMBER": str(number)}, arguments=(argument,))
        for number, argument in enumerate(arguments)
    ]


def run(code: str, made: Sequence[WorkerPlan]) -> tuple[list[Ended], list[str]]:
    said: list[str] = []
    return run_workers(python(code), made, say=said.append), said


def test_each_sees_its_own_gpus_and_cores() -> None:
    first, second = plan_workers(Placement(replicas=(("GPU-a",), ("GPU-b",))), cores=8)
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert first.arguments == ("--device", "cuda")
    assert "OMP_NUM_THREADS" not in first.environment
    (sharded,) = plan_workers(Placement(replicas=(("0", "1"),)), cores=8)
    assert sharded.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert sharded.arguments == ("--device", "cuda", "--shards", "2")
    cpus = plan_workers(Placement(replicas=((), (), ())), cores=8)
    assert [plan.environment["OMP_NUM_THREADS"] for plan in cpus] == ["2", "2", "2"]
    assert all(plan.environment[SUPERVISED] == "1" for plan in cpus)


def test_what_workers_say_is_relayed_with_their_names() -> None:
    code = "import os, sys; print(f'flatout: {os.environ[\"NUMBER\"]} {sys.argv[1]}', file=sys.stderr)"
    ended, said = run(code, plans("a", "b"))
    assert ended == [Ended(name="worker 0", code=0), Ended(name="worker 1", code=0)]
    assert {"worker 0: 0 a", "worker 1: 1 b"} <= set(said)


def test_one_that_is_killed_is_told_of_and_the_rest_count() -> None:
    code = "import os, sys\nif sys.argv[1] == 'dies': os.kill(os.getpid(), 9)"
    ended, said = run(code, plans("dies", "lives"))
    assert [one.code for one in ended] == [-9, 0]
    assert "worker 0 ended: killed by SIGKILL; what it was running goes to the others" in said


def test_if_none_comes_to_an_end_it_is_an_error_that_names_them() -> None:
    with pytest.raises(ChildDied, match="worker 0 exit code 3, worker 1 exit code 3"):
        run("raise SystemExit(3)", plans("a", "b"))


WAITING = "import sys, time\nprint('waiting', file=sys.stderr, flush=True)\nwhile True: time.sleep(60)"
STARTER = f"""
from flatout.engines.steering.workers import WorkerPlan, run_workers
import sys
child = {WAITING!r}
plans = [WorkerPlan(name="w", environment={{}})]
run_workers([sys.executable, "-c", child], plans, say=lambda line: print(line, flush=True))
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
    said = lines_until(process, "w: waiting")
    pid = int(said[0].rpartition(" ")[2])
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert "Interrupted: interrupted (every finished row is kept" in stderr
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


SUPERVISED_CHILD = """
import sys, threading
from flatout.engines.steering.workers import end_with_starter
end_with_starter()
try:
    print("ready", flush=True)
    threading.Event().wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_a_worker_ends_when_its_starter_is_gone() -> None:
    child = subprocess.Popen(
        python(SUPERVISED_CHILD),
        env={**os.environ, SUPERVISED: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines_until(child, "ready")
    stdout, _ = child.communicate()  # closes its standard input
    assert stdout == "interrupted\n"
    assert child.returncode == 0
