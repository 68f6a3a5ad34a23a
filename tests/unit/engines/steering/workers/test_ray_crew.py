"""Workers on a real Ray cluster of two nodes, where Ray is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.engines.steering.workers.ray_crew import RayCrew, run_command
from flatout.ground.errors import MissingExtra

HAS_RAY = importlib.util.find_spec("ray") is not None
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

# In a process of its own: Ray leaves threads, sockets and warnings behind.
ON_TWO_NODES = """
import json, os, sys
from ray.cluster_utils import Cluster
from flatout.engines.steering.workers.ray_crew import RayCrew
from flatout.ground.errors import BadInput

folder, child = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
cluster.add_node(num_cpus=1, num_gpus=0)
said, answer = [], {}

def codes(command, **changes):
    options = {"workers": 2, "gpus_each": 0, "address": cluster.address, **changes}
    with RayCrew(command, **options, on_progress=said.append) as crew:
        return [one.code for one in crew.wait()]

answer["codes"] = codes([sys.executable, child, folder])
answer["failed"] = codes([sys.executable, "-c", "import sys; sys.exit('no luck')"])
try:
    codes(["true"], gpus_each=4)
except BadInput as error:
    answer["refused"] = str(error)
answer["said"] = said
cluster.shutdown()
print(json.dumps(answer))
"""
# The first worker waits for the second at a pipe: both end only if both run at the same time.
CHILD = """
import os, sys
folder = sys.argv[1]
try:
    os.close(os.open(f"{folder}/first", os.O_CREAT | os.O_EXCL))
    is_first = True
except FileExistsError:
    is_first = False
os.close(os.open(f"{folder}/pipe", os.O_RDONLY if is_first else os.O_WRONLY))
"""


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed: pip install 'flatout[ray]'")
def test_workers_run_on_two_nodes_at_once(tmp_path: Path) -> None:
    script, child, folder = tmp_path / "driver.py", tmp_path / "child.py", tmp_path / "met"
    script.write_text(ON_TWO_NODES)
    child.write_text(CHILD)
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    done = subprocess.run(
        [sys.executable, script, folder, child], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    # Each node has one CPU and each worker takes one: two that met stood on two nodes.
    assert answer["codes"] == [0, 0], answer
    assert "a worker wants 4 GPUs" in answer["refused"]
    assert answer["failed"] == [1, 1]
    assert any("no luck" in line for line in answer["said"])


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray_the_extra_is_named() -> None:
    with pytest.raises(MissingExtra, match=r"flatout\[ray\]"):
        RayCrew(["true"], workers=1, gpus_each=0, on_progress=print)


def test_a_worker_of_a_node_answers_with_its_code_and_last_lines(tmp_path: Path) -> None:
    code = "import sys; [print(i, file=sys.stderr) for i in range(9)]; sys.exit(4)"
    returned, tail, node = run_command([sys.executable, "-c", code], str(tmp_path))
    assert (returned, tail) == (4, ["4", "5", "6", "7", "8"])
    assert node
