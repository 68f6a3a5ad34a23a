"""Worker processes of one search: each holds a replica of the model and draws trials from the same study.

Nothing passes between workers but the study: the storage is the queue, so a worker may start late, stand on
another machine, or be killed at any moment.  What a killed worker had finished is in the storage, and what it
was running is taken over by another.  The process that starts them is the first worker itself: it relays what
the others say, passes an interrupt on, and takes over what they leave open.

A worker must not keep its GPU after its starter has ended.  Its standard input is a pipe that nobody writes
to; when it closes, the starter has ended, and the worker ends as if interrupted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from flatout.engines.steering.workers.placement import Placement
from flatout.ground import OnProgress

SUPERVISED = "FLATOUT_STEER_SUPERVISED"
GRACE_S = 30.0  # for a worker to write down what it has, after an interrupt


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """One worker: its name in the study, and its arguments beyond the shared command."""

    name: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedWorker:
    """How a worker ended: an exit code, or minus the signal that killed it."""

    name: str
    code: int

    @property
    def reason(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


def plan_workers(placement: Placement, *, cores: int) -> list[WorkerPlan]:
    """Plan a worker for each replica but the first; it sees its own GPUs and its share of the cores alone."""
    plans = []
    threads = max(1, cores // len(placement.replicas))
    for number, gpus in enumerate(placement.replicas[1:], start=1):
        environment = {SUPERVISED: "1"}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.name for gpu in gpus)
            arguments: tuple[str, ...] = ("--device", "cuda")
        else:
            environment["OMP_NUM_THREADS"] = str(threads)
            arguments = ("--device", "cpu")
        arguments += ("--worker", str(number))
        plans.append(WorkerPlan(name=str(number), environment=environment, arguments=arguments))
    return plans


class WorkerProcesses:
    """Workers in addition to the one in this process; leaving the block early interrupts them."""

    def __init__(
        self, command: Sequence[str], plans: Sequence[WorkerPlan], *, on_progress: OnProgress
    ) -> None:
        self._command, self._plans, self._on_progress = command, plans, on_progress
        self._running: list[_WorkerProcess] = []

    def __enter__(self) -> WorkerProcesses:
        try:
            for plan in self._plans:
                self._running.append(_WorkerProcess(self._command, plan, on_progress=self._on_progress))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def wait(self) -> list[EndedWorker]:
        """Wait until all have ended, successfully or not."""
        ended = []
        while self._running:
            ended.append(self._running[0].wait())
            del self._running[0]
        for one in ended:
            if one.code:
                self._on_progress(
                    f"worker {one.name} ended: {one.reason}; another worker takes over its trials"
                )
        return ended

    def _stop(self) -> None:
        for worker in self._running:
            worker.interrupt()
        for worker in self._running:
            worker.end()
        self._running = []


class _WorkerProcess:
    """One child process and the thread that reads what it says."""

    def __init__(self, command: Sequence[str], plan: WorkerPlan, *, on_progress: OnProgress) -> None:
        self.plan = plan
        self._on_progress = on_progress
        self._is_interrupted = False
        # A session of its own: Ctrl-C reaches the starter alone, which passes it on once.
        self._process = subprocess.Popen(
            [*command, *plan.arguments],
            env={**os.environ, **plan.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stderr is not None
        on_progress(f"worker {plan.name} is process {self._process.pid}")  # before anything it says
        self._reader = threading.Thread(target=self._relay, args=(self._process.stderr,), daemon=True)
        self._reader.start()

    def _relay(self, stream: IO[str]) -> None:
        for line in stream:
            if line.strip() and not self._is_interrupted:
                self._on_progress(f"worker {self.plan.name}: {line.rstrip().removeprefix('flatout: ')}")

    def wait(self) -> EndedWorker:
        code = self._process.wait()
        self._close()
        return EndedWorker(name=self.plan.name, code=code)

    def interrupt(self) -> None:
        self._is_interrupted = True  # where it was, perhaps importing, is of no use to anybody
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Wait a while for it to end by itself, then kill it."""
        try:
            self._process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close()

    def _close(self) -> None:
        # What a worker's own children still hold open is not waited for.
        self._reader.join(timeout=5.0)
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.stderr is not None and not self._reader.is_alive():
            self._process.stderr.close()


def end_with_starter() -> None:
    """Interrupt this worker when the process that started it is gone."""
    if os.environ.get(SUPERVISED) != "1":
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs like that
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True, name="starter").start()
