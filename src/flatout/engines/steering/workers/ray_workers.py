"""Workers on the nodes of a Ray cluster.

Ray finds free GPUs and starts a process beside each; nothing else of a search goes through it.  The workers
are those that `--workers` starts, and they meet in the study's storage: every node must reach it, and find
the model and the questions under the same paths.  A worker is a child of Ray's task, so that a cancelled task
or a lost driver closes its standard input, and with it the worker.  Of a lost node the worker starts again
elsewhere under its name, and goes on with what it had begun; one that found no room waits for a node to join.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flatout.engines.steering.workers.worker_processes import SUPERVISED, EndedWorker
from flatout.ground import OnProgress
from flatout.ground.errors import BadInput
from flatout.hardware.ray_cluster import RayCluster

TAIL_LINES = 5


class RayWorkers:
    """Workers wherever Ray finds room; leaving the block early cancels them.

    `beats` returns the last heartbeat of each worker: one that has sent none since it was requested is not
    waited for.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        workers: int,
        gpus_each: int,
        address: str = "auto",
        beats: Callable[[], Mapping[str, object]] | None = None,
        on_progress: OnProgress,
    ) -> None:
        self._command, self._workers, self._beats, self._on_progress = command, workers, beats, on_progress
        self._cluster = RayCluster(address, gpus=gpus_each, cpus=1)
        self._waiting: dict[Any, str] = {}  # task -> name of its worker

    def __enter__(self) -> RayWorkers:
        self._cluster.__enter__()
        self._before = self._beats() if self._beats else {}
        if lack := self._cluster.describe_lack():
            self._on_progress(lack)
        device = "cuda" if self._cluster.gpus else "cpu"
        for number in range(self._workers):
            name = f"ray-{number}"
            command = [*self._command, "--device", device, "--worker", name]
            self._waiting[self._cluster.submit(run_command, command)] = name
        return self

    def __exit__(self, *error: object) -> None:
        self._cluster.__exit__(*error)

    def wait(self) -> list[EndedWorker]:
        """Wait until all started workers have ended, successfully or not."""
        ended = self._cancel_unbegun(self._beats()) if self._beats else []
        while self._waiting:
            for task in self._cluster.wait(self._waiting):
                try:
                    _, (code, tail, host) = self._cluster.result(task)
                except BadInput as error:
                    code, tail, host = 1, [error.message], "the cluster"
                ended.append(EndedWorker(name=self._waiting.pop(task), code=code))
                said = f": {' | '.join(tail)}" if code and tail else ""
                self._on_progress(f"worker {ended[-1].name} on {host} ended with {ended[-1].reason}{said}")
        return ended

    def _cancel_unbegun(self, now: Mapping[str, object]) -> list[EndedWorker]:
        """Cancel what still waits for a node or loads its model: the study has all its trials."""
        unbegun = []
        for task, name in list(self._waiting.items()):
            if name in now and now[name] != self._before.get(name):
                continue
            if not self._cluster.wait([task], timeout_s=0):
                self._cluster.cancel(task)
                unbegun.append(EndedWorker(name=self._waiting.pop(task), code=0))
                self._on_progress(f"worker {name} was not needed")
        return unbegun


def run_command(command: Sequence[str]) -> tuple[int, list[str], str]:
    """Run a worker as a child on a node; return its exit code, its last lines, and the node's name."""
    with subprocess.Popen(
        list(command),
        env={**os.environ, SUPERVISED: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as child:
        assert child.stderr is not None
        tail = [line.strip() for line in child.stderr if line.strip()][-TAIL_LINES:]
    return child.returncode, tail, socket.gethostname()
