"""Workers on the nodes of a Ray cluster.

Ray finds free GPUs and starts a process beside each; nothing else of a search goes through it.  The workers
are those that `--workers` starts, and they meet in the study's storage: every node must reach it, and find
the model and the questions under the same paths.  A worker is a child of Ray's task, so that a cancelled task
or a lost driver closes its standard input, and with it the worker.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.engines.steering.workers import SUPERVISED, Ended
from flatout.errors import BadInput, ChildDied, Interrupted, import_extra

TAIL_LINES = 5
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RayPlan:
    """How many workers, and what Ray is to keep for each."""

    workers: int
    gpus_each: int
    cpus_each: int = 1
    address: str = "auto"  # of a running cluster; "local" starts one of this machine


def run_on_ray(command: Sequence[str], plan: RayPlan, *, say: Say) -> list[Ended]:
    """Run `command` once for each worker, wherever Ray finds room, until all have ended."""
    ray = import_extra("ray", extra="ray")
    with _Connection(ray, plan.address):
        _check_room(ray, plan)
        start = ray.remote(run_command).options(
            num_cpus=plan.cpus_each,
            num_gpus=plan.gpus_each,
            scheduling_strategy="SPREAD",
            max_retries=1,  # of a node that was lost: its worker starts again elsewhere and joins the study
        )
        arguments: tuple[str, ...] = ("--device", "cuda") if plan.gpus_each else ("--device", "cpu")
        if plan.gpus_each > 1:
            arguments += ("--shards", str(plan.gpus_each))
        tasks = {start.remote([*command, *arguments]): f"worker {i}" for i in range(plan.workers)}
        return _gathered(ray, tasks, say=say)


def _gathered(ray: Any, tasks: dict[Any, str], *, say: Say) -> list[Ended]:
    ended = []
    waiting = list(tasks)
    try:
        while waiting:
            (task,), waiting = ray.wait(waiting, num_returns=1)
            name = tasks[task]
            try:
                code, tail, node = ray.get(task)
            except ray.exceptions.RayError as error:
                code, tail, node = 1, [f"{type(error).__name__}"], "a lost node"
            ended.append(Ended(name=name, code=code))
            said = f": {' | '.join(tail)}" if code and tail else ""
            say(f"{name} on {node} ended with {ended[-1].reason}{said}")
    except KeyboardInterrupt:
        for task in waiting:
            ray.cancel(task, force=True)
        raise Interrupted("interrupted", hint="every finished row is kept; run it again to go on") from None
    if ended and all(one.code for one in ended):
        raise ChildDied(
            f"none of {len(ended)} workers on Ray came to an end",
            hint="every finished row is kept; read what they said above, then run it again",
        )
    return ended


def run_command(command: Sequence[str]) -> tuple[int, list[str], str]:
    """On a node: run a worker as a child; its exit code, its last lines, and the node's name."""
    import socket

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


class _Connection:
    """A connection to a cluster that is closed again, unless the caller had one before."""

    def __init__(self, ray: Any, address: str) -> None:
        self._ray, self._address = ray, address
        self._had_one = ray.is_initialized()

    def __enter__(self) -> None:
        if self._had_one:
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anyone unasked
        try:
            self._ray.init(address=self._address, log_to_driver=False, logging_level="error")
        except ConnectionError:
            raise BadInput(
                f"no Ray cluster at {self._address!r}", hint="start one with ray start --head, or --ray local"
            ) from None

    def __exit__(self, *error: object) -> None:
        if not self._had_one:
            self._ray.shutdown()


def _check_room(ray: Any, plan: RayPlan) -> None:
    """A task that no node can hold would wait forever."""
    wanted = {"CPU": plan.cpus_each, "GPU": plan.gpus_each}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(kind, 0) >= number for kind, number in wanted.items()) for node in nodes):
        most = {kind: max((int(node.get(kind, 0)) for node in nodes), default=0) for kind in wanted}
        raise BadInput(
            f"a worker wants {plan.gpus_each} GPUs and {plan.cpus_each} CPUs; the {len(nodes)} nodes of the "
            f"Ray cluster have at most {most['GPU']} and {most['CPU']}",
            hint="take --device cpu, or add a node that has them",
        )
