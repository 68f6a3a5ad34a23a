"""A Ray cluster: run functions there, each with a fixed share of a node.

Ray finds a node with room, starts a process on it and, where a node is lost, starts the task again on
another; nodes may join and leave while tasks wait.  A task that is timed must not share what it is timed on:
it takes the cores that belong to its GPUs, and without GPUs a whole node.  Every node must find the same
files under the same paths: a shared folder, or the working folder that Ray copies for a job.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from flatout.ground.errors import BadInput, import_extra

NODE_LABEL = "ray.io/node-id"


class RayCluster:
    """A connection to a cluster for tasks of equal shares; leaving the block cancels running tasks.

    `address` is that of a running cluster; "auto" finds it, as RAY_ADDRESS says or on this machine, and
    "local" starts one here.  Without `cpus` a task has the cores of its GPUs on the roomiest node.
    """

    def __init__(self, address: str, *, gpus: int = 0, cpus: int | None = None) -> None:
        self.address, self.gpus, self._cpus = address, gpus, cpus
        self.ray: Any = import_extra("ray", extra="ray")
        self._had_connection = self.ray.is_initialized()
        self._folder = os.getcwd()  # before Ray connects, which may replace its copy of a job's folder
        self._running: set[Any] = set()
        self._output = contextlib.redirect_stdout(sys.stderr)  # what Ray prints is not our result
        self._avoided: list[str] = []

    def __enter__(self) -> RayCluster:
        if not self._had_connection:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
            try:
                self.ray.init(address=self.address, log_to_driver=False, logging_level="error")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise BadInput(
                    f"no Ray cluster at {self.address!r}: {' '.join(str(error).split())[:120]}",
                    hint="start one with ray start --head, or use --ray local",
                ) from None
        self._output.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for task in list(self._running):
            self.cancel(task)
        if not self._had_connection:
            self.ray.shutdown()
        self._output.__exit__(None, None, None)

    def take(self, gpus: int) -> None:
        """Give each further task this many GPUs and their cores; none if no node has a GPU."""
        self.gpus = gpus if any(have for _, have in self._rooms()) else 0
        self._cpus = None

    @property
    def cpus(self) -> int:
        """The cores of a task: known as soon as a node has room for one."""
        if self._cpus is None:
            shares = [
                int(cpus * self.gpus // gpus) if self.gpus else int(cpus)
                for cpus, gpus in self._rooms()
                if gpus >= self.gpus and cpus >= 1
            ]
            self._cpus = max(1, *shares) if shares else None
        return self._cpus or 1

    def slots(self) -> int:
        """Count the tasks that the nodes of this moment hold at once."""
        cpus = self.cpus
        return sum(
            int(min(have // cpus, gpus // self.gpus if self.gpus else have // cpus))
            for have, gpus in self._rooms()
        )

    def describe_lack(self) -> str | None:
        """Say what no node has; None if a task has room."""
        if self.slots():
            return None
        most = [int(max(kind, default=0)) for kind in zip(*self._rooms(), strict=True)] or [0, 0]
        return (
            f"a task takes {self.gpus} GPUs and {self.cpus} CPUs; a node of the Ray cluster has at most"
            f" {most[1]} and {most[0]}: waiting for one to join"
        )

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Start `function(*arguments)` in this folder on a node; a lost node starts it again on another."""
        options: dict[str, Any] = {
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "scheduling_strategy": "SPREAD",
            "max_retries": -1,
        }
        if self._avoided:
            options["label_selector"] = {NODE_LABEL: f"!in({','.join(self._avoided)})"}
        start = self.ray.remote(_run_there).options(**options)
        task = start.remote(function, self._folder, arguments)
        self._running.add(task)
        return task

    def wait(self, tasks: Collection[Any], *, number: int = 1, timeout_s: float | None = None) -> list[Any]:
        """Wait until this many have ended; return those that have."""
        ended: list[Any] = self.ray.wait(list(tasks), num_returns=number, timeout=timeout_s)[0]
        return ended

    def result(self, task: Any) -> tuple[str, Any]:
        """Wait for a task; return its node and what its function returned."""
        try:
            found: tuple[str, Any] = self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise BadInput(
                f"a task on the Ray cluster failed: {said[-1] if said else type(error).__name__}",
                hint="every node needs the same flatout, and the same files under the same paths",
            ) from None
        finally:
            self._running.discard(task)
        return found

    def cancel(self, task: Any, *, interrupt: bool = False) -> None:
        """End a task, whether it runs or waits: by an interrupt, which lets it clean up, or at once."""
        self._running.discard(task)
        self.ray.cancel(task, force=not interrupt)

    def avoid(self, node: str) -> None:
        """Start no more tasks on a node."""
        self._avoided.append(node)

    def _rooms(self) -> list[tuple[float, float]]:
        """List the CPUs and GPUs of each node that is alive."""
        return [
            (node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0))
            for node in self.ray.nodes()
            if node["Alive"] and node["NodeID"] not in self._avoided
        ]


def _run_there(function: Callable[..., Any], folder: str, arguments: Sequence[Any]) -> tuple[str, Any]:
    """Run a function on a node as if it was called where the command was given."""
    ray: Any = import_extra("ray", extra="ray")
    # A job's working folder may lie elsewhere on another node; Ray has made it the process's own there.
    with contextlib.chdir(folder if os.path.isdir(folder) else os.getcwd()):
        return ray.get_runtime_context().get_node_id(), function(*arguments)
