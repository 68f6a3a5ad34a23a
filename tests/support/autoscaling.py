"""A Ray cluster that starts nodes while tasks wait and removes idle ones, in a namespace of its own.

Ray's own simulation of a cloud starts a process per node.  Its daemons are children of nobody and use fixed
ports, so that all of it happens in a namespace of processes and network, and ends with it: root needed.

    python -m tests.support.autoscaling FOLDER COMMAND...    runs the command, and prints a JSON line
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.two_nodes import ENVIRONMENT, STORE_BYTES

HEAD = "ray.head.default"  # as the simulated cloud calls it
NAMESPACE = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
IDLE_S, LONGEST_S = 3.0, 240.0


def may_have_namespace() -> bool:
    tools = shutil.which("unshare") and shutil.which("ip")
    if not tools:
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


def run_on_cluster(folder: Path, *command: str) -> dict[str, Any]:
    """Run a command on a cluster that has no node for a task at first.

    Returns its exit code and what it wrote, the most nodes at a time, and how many were left at the end.
    """
    own = [sys.executable, "-m", "tests.support.autoscaling", str(folder), *command]
    with tempfile.TemporaryDirectory(prefix="fo-ray-", dir="/tmp") as short:  # as a socket's path must be
        done = subprocess.run(
            [*NAMESPACE, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *own],
            env={**os.environ, **ENVIRONMENT, "RAY_TMPDIR": short},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def settings() -> dict[str, Any]:
    """Of the autoscaler: a head without a CPU, and at most one node of one."""
    kinds = {
        HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": {"CPU": 1, "object_store_memory": STORE_BYTES},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 1,
        },
    }
    lists = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    lists += ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files")
    return {
        "cluster_name": "simulated",
        "max_workers": 1,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": kinds,
        "head_node_type": HEAD,
        **{name: [] for name in (*lists, "rsync_exclude", "rsync_filter")},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        "file_mounts_sync_continuously": False,
    }


def main(folder: str, *command: str) -> None:
    import ray

    path = Path(folder) / "cluster.json"
    path.write_text(json.dumps(settings()))
    os.environ |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    head = ["ray", "start", "--head", "--num-cpus=0", f"--object-store-memory={STORE_BYTES}"]
    subprocess.run(
        [*head, "--include-dashboard=false", f"--autoscaling-config={path}"], stdout=sys.stderr, check=True
    )
    with contextlib.redirect_stdout(sys.stderr):
        ray.init("auto", log_to_driver=False, logging_level="error")

    def count() -> int:
        return sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())

    at_first = most = count()
    with (Path(folder) / "said").open("w+") as said:
        running = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "RAY_ADDRESS": "auto"}, stdout=said, stderr=said
        )
        while running.poll() is None:
            most = max(most, count())
            time.sleep(0.1)
        ended_s = time.monotonic()
        while count() and time.monotonic() - ended_s < LONGEST_S:
            time.sleep(0.1)
        said.seek(0)
        found = {"code": running.returncode, "said": said.read()}
    print(json.dumps({**found, "at_first": at_first, "most": most, "left": count()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
