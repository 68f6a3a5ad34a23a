"""A real Ray cluster of two nodes on this machine, in a process of its own.

Ray leaves threads, sockets and warnings behind, so that a test talks to it over a pipe: a line "remove" kills
the raylet of the last node, "add" brings another.  When the pipe closes, whatever ended the test, the cluster
ends.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Self

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),  # for a job's command
    "PYTHONPATH": os.pathsep.join(sys.path),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # another process's memory is none of its business
    "RAY_worker_niceness": "0",  # else whatever else runs here comes first
}
STORE_BYTES = 80 * 2**20  # /dev/shm of a container is small; Ray takes no less than 75 MiB


class TwoNodes:
    """Nodes of one CPU each, or of `cpus`, while the block lasts.

    `takes_jobs` starts the server that `ray job submit` talks to, at `jobs`, on nodes that claim a GPU.
    """

    def __init__(self, *, cpus: int = 1, nodes: int = 2, takes_jobs: bool = False) -> None:
        self._folder = tempfile.mkdtemp(prefix="fo-ray-", dir="/tmp")  # a socket's path must be short
        os.mkdir(f"{self._folder}/ray")
        self.environment = {**os.environ, **ENVIRONMENT, "RAY_TMPDIR": self._folder}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.two_nodes", str(cpus), str(nodes), str(int(takes_jobs))],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        self.address = self._answer()
        self.jobs = f"http://{self._answer()}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)

    def remove(self) -> None:
        """Kill the node that joined last."""
        self._say("remove")

    def add(self) -> None:
        """Let a node join."""
        self._say("add")

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        assert self._answer() == word

    def _answer(self) -> str:
        assert self._process.stdout is not None and self._process.stderr is not None
        for line in self._process.stdout:  # Ray may print, too
            if line.startswith("flatout "):
                return line.split()[1]
        raise RuntimeError(f"no Ray cluster: {self._process.stderr.read()[-2000:]}")


def main(cpus: str, nodes: str, takes_jobs: str) -> None:
    from ray.cluster_utils import Cluster

    each = {"num_cpus": int(cpus), "num_gpus": int(takes_jobs), "object_store_memory": STORE_BYTES}
    head = {**each, "include_dashboard": bool(int(takes_jobs)), "dashboard_port": 0}
    head["dashboard_agent_listen_port"] = free_port()  # the heads of two clusters would share one by default
    cluster = Cluster(initialize_head=True, head_node_args=head)
    joined = [cluster.add_node(wait=False, **each) for _ in range(int(nodes) - 1)]
    cluster.wait_for_nodes()
    print("flatout", cluster.address, flush=True)
    print("flatout", cluster.head_node.webui_url or "none", flush=True)
    for line in sys.stdin:
        if line.strip() == "remove":
            cluster.remove_node(joined.pop(), allow_graceful=False)
        else:
            joined.append(cluster.add_node(**each))
        print("flatout", line.strip(), flush=True)
    cluster.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
