"""Workers on the nodes of a Ray cluster.

Ray finds free GPUs and starts a process beside each; nothing else of a search goes through it.  The workers
are those that `--workers` starts, and they meet in the study's storage: every node must reach it, and find
the model and the questions under the same paths.  A worker is a child of Ray's task, so that a cancelled task
or a lost driver closes its standard input, and with it the worker.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any

from flatout.engines.run.folder import OnProgress
from flatout.engines.steering.workers.crew import SUPERVISED, Ended
from flatout.ground.errors import BadInput, import_extra

TAIL_LINES = 5


class RayCrew:
    """Workers wherever Ray finds room; leaving the block early cancels them.

    `address` is that of a running cluster; "auto" finds it, "local" starts one of this machine.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        workers: int,
        gpus_each: int,
        address: str = "auto",
        on_progress: OnProgress,
    ) -> None:
        self._command, self._workers, self._address = command, workers, address
        self._gpus_each, self._on_progress = gpus_each, on_progress
        self._ray: Any = import_extra("ray", extra="ray")
        self._had_connection = self._ray.is_initialized()
        self._waiting: dict[Any, str] = {}  # task -> name of its worker

    def __enter__(self) -> RayCrew:
        if not self._had_connection:
            self._connect()
        try:
            self._check_room()
        except BadInput:
            self.__exit__()
            raise
        start = self._ray.remote(run_command).options(
            num_cpus=1,
            num_gpus=self._gpus_each,
            scheduling_strategy="SPREAD",
            max_retries=1,  # of a node that was lost: its worker starts again elsewhere and joins the study
        )
        device = "cuda" if self._gpus_each else "cpu"
        for number in range(self._workers):
            name = f"ray-{number}"
            command = [*self._command, "--device", device, "--worker", name]
            task = start.remote(command, os.getcwd())
            self._waiting[task] = name
        return self

    def __exit__(self, *error: object) -> None:
        for task in self._waiting:
            self._ray.cancel(task, force=True)
        if not self._had_connection:
            self._ray.shutdown()

    def wait(self) -> list[Ended]:
        """Wait until all have ended, well or not."""
        ended = []
        while self._waiting:
            (task,), _ = self._ray.wait(list(self._waiting), num_returns=1)
            try:
                code, tail, node = self._ray.get(task)
            except self._ray.exceptions.RayError as error:
                code, tail, node = 1, [type(error).__name__], "a lost node"
            ended.append(Ended(name=self._waiting.pop(task), code=code))
            said = f": {' | '.join(tail)}" if code and tail else ""
            self._on_progress(f"worker {ended[-1].name} on {node} ended with {ended[-1].reason}{said}")
        return ended

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anyone unasked
        try:
            self._ray.init(address=self._address, log_to_driver=False, logging_level="error")
        except ConnectionError:
            raise BadInput(
                f"no Ray cluster at {self._address!r}",
                hint="start one with ray start --head, or take --ray local",
            ) from None

    def _check_room(self) -> None:
        """Refuse a task that no node can hold: it would wait forever."""
        wanted = {"CPU": 1, "GPU": self._gpus_each}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if any(all(node.get(kind, 0) >= number for kind, number in wanted.items()) for node in nodes):
            return
        most = {kind: max((int(node.get(kind, 0)) for node in nodes), default=0) for kind in wanted}
        raise BadInput(
            f"a worker wants {self._gpus_each} GPUs and 1 CPU; the {len(nodes)} nodes of"
            f" the Ray cluster have at most {most['GPU']} and {most['CPU']}",
            hint="take --device cpu, or add a node that has them",
        )


def run_command(command: Sequence[str], folder: str) -> tuple[int, list[str], str]:
    """Run a worker as a child on a node; return its exit code, its last lines, and the node's name."""
    import socket

    with subprocess.Popen(
        list(command),
        cwd=folder,
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
