"""A search and the trials of a tuning on a real Ray cluster; a node is killed, and another joins late."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.autoscaling import may_have_namespace, run_on_cluster
from tests.support.steering import tiny_search, write_tiny
from tests.support.two_nodes import TwoNodes
from tests.support.warm_python import DRIVER, warm

# A judge at which every worker waits: the first one at its first text, those of the cluster at their third.
GATE = """
import os, pathlib, time
folder, seen = pathlib.Path(__file__).parent, 0

def judge(question, text):
    global seen
    seen += 1
    is_on_cluster = "FLATOUT_STEER_SUPERVISED" in os.environ
    if is_on_cluster and seen == 3:
        (folder / f"waits-{os.getpid()}").touch()
    while (seen == 3 or not is_on_cluster) and not (folder / "open").exists():
        time.sleep(0.02)
    return float(len(text))
"""

# A judge at which the command's own worker waits until one of the cluster has answered.
COMPANY = """
import os, pathlib, time
here = pathlib.Path(__file__).with_name("somebody")

def judge(question, text):
    if "FLATOUT_STEER_SUPERVISED" in os.environ:
        here.touch()
    while not here.exists():
        time.sleep(0.02)
    return float(len(text))
"""

# What a script writes goes to a folder of its trial; what its children write does not.
TRAIN = """
import os, pathlib, subprocess, time, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
subprocess.run(["touch", f"waits-{os.getppid()}"])
while not pathlib.Path("open").exists():
    time.sleep(0.02)
for step in range(100):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

TRIALS = """
import json
from pathlib import Path
from flatout.hardware.ray_cluster import RayCluster
from flatout.tuner.treatment import Dose
from flatout.tuner.trial.journal import Journal
from flatout.tuner.trial.on_cluster import ClusterTrials
from flatout.tuner.trials import TrialPlan, pair_of

first, second = [], [Dose(name="garbage-every", value=50)]
plan = TrialPlan(warmup=2, blocks=2, block_steps=2, limit_s=120.0)
journal = Journal(Path("journal.jsonl"), job={})
with RayCluster("auto") as cluster:
    with ClusterTrials(cluster, ["train.py"], module=False, plan=plan, journal=journal) as trials:
        trials.expect("ahead", [pair_of(first, second), ((tuple(second), {}),)])
        found = [*trials.run_pairs([pair_of(first, second)])[0], trials.run(second)]
print(json.dumps([[run.ended, run.losses, len(run.blocks_s)] for run in found]))
"""


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "ray_job.sh"


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with TwoNodes() as made:
        yield made


def until(happens: Callable[[], Any]) -> None:
    for _ in range(3000):
        if happens():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen within minutes")


def takes_a_job(address: str) -> bool:
    """Whether a node's agent has registered: until then the server answers that it has none."""
    job = json.dumps({"entrypoint": "true"}).encode()
    request = urllib.request.Request(f"{address}/api/jobs/", job, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except urllib.error.HTTPError as answer:
        answer.close()
        return False
    except OSError:  # it does not answer at all
        return False


@contextlib.contextmanager
def nodes_that_take_jobs() -> Iterator[TwoNodes]:
    """On a busy machine Ray can give up on a node's agent for good; another cluster has another one."""
    for _attempt in range(3):
        with TwoNodes(takes_jobs=True) as nodes:
            if any(takes_a_job(nodes.jobs) or time.sleep(1) for _ in range(30)):
                yield nodes
                return
    raise AssertionError("no agent of three clusters registered")


def start(nodes: TwoNodes, folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(warm().bin / "python"), "-c", *map(str, arguments)],
        cwd=folder,
        env={**nodes.environment, "HF_HUB_OFFLINE": "1", "RAY_ADDRESS": nodes.address},  # as Ray tells a job
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rows_in(out: Path) -> dict[str, list[str]]:
    return {path.stem: path.read_text().splitlines() for path in (out / "rows").glob("*.jsonl")}


def test_a_killed_node_costs_a_search_no_row_and_its_worker_goes_on_elsewhere(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    tiny, out = write_tiny(tmp_path / "tiny"), tmp_path / "run"
    (tmp_path / "gate.py").write_text(GATE)
    config = tmp_path / "search.yaml"
    given = tiny_search(tiny, out, judge="gate:judge", max_new_tokens=3, workers=2, ray=nodes.address)
    config.write_text(json.dumps(given))
    driver = start(nodes, tmp_path, DRIVER, warm().bin / "python", "steer", "search", config, "--json")
    until(lambda: driver.poll() is not None or len([*tmp_path.glob("waits-*")]) == 2)
    before = rows_in(out)
    assert [len(before.get(name, ())) for name in ("ray-0", "ray-1")] == [2, 2], driver.communicate()
    workers = [int(path.name.removeprefix("waits-")) for path in tmp_path.glob("waits-*")]
    nodes.remove()
    until(lambda: sum(map(psutil.pid_exists, workers)) == 1)  # a worker ends with its node
    nodes.add()
    # The other node is full: who was lost begins again on the one that joined.
    until(lambda: driver.poll() is not None or len([*tmp_path.glob("waits-*")]) == 3)
    (tmp_path / "open").touch()
    printed, told = driver.communicate()
    assert driver.returncode == 0, told
    assert len([*tmp_path.glob("waits-*")]) >= 3, told
    after = rows_in(out)
    for name, rows in before.items():
        assert after[name][: len(rows)] == rows, "a finished row was lost"
    counted = Counter(
        (row["trial"], row["question"]) for rows in after.values() for row in map(json.loads, rows)
    )
    assert max(counted.values()) == 1, "a finished row was run again"
    trials = json.loads(printed)["trials"]
    assert len(trials) >= 12 and {trial["state"] for trial in trials} <= {"complete", "pruned"}


@pytest.mark.skipif(not may_have_namespace(), reason="needs root, for a namespace of processes")
@pytest.mark.timeout(600)
def test_a_node_comes_for_a_worker_that_waits_and_goes_when_it_is_idle(tmp_path: Path) -> None:
    given = tiny_search(
        write_tiny(tmp_path / "tiny"), tmp_path / "run", judge="company:judge", max_new_tokens=3, workers=1
    )
    (tmp_path / "company.py").write_text(COMPANY)
    (tmp_path / "search.yaml").write_text(json.dumps(given))
    command = [sys.executable, "-m", "flatout", "steer", "search", "search.yaml", "--ray", "auto"]
    found = run_on_cluster(tmp_path, *command)
    assert found["code"] == 0, found["said"]
    assert [found[when] for when in ("at_first", "most", "left")] == [0, 1, 0]
    assert "waiting for one to join" in found["said"]
    assert rows_in(tmp_path / "run")["ray-0"]


def test_a_pair_is_one_task_and_what_a_lost_node_ran_runs_again(nodes: TwoNodes, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    driver = start(nodes, tmp_path, TRIALS)
    until(lambda: driver.poll() is not None or len([*tmp_path.glob("waits-*")]) == 2)  # two nodes at once
    assert driver.poll() is None, driver.communicate()
    nodes.remove()
    nodes.add()
    until(
        lambda: driver.poll() is not None or len([*tmp_path.glob("waits-*")]) == 3
    )  # on the one that joined
    (tmp_path / "open").touch()
    printed, told = driver.communicate()
    assert driver.returncode == 0, told
    found = json.loads(printed.splitlines()[-1])
    assert len(found) == 3 and all(run == found[0] for run in found), found
    assert found[0][0] == "measured" and found[0][2] == 2
    _, *written = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert sorted(len(json.loads(line)["results"]) for line in written) == [1, 2]


def test_the_job_of_the_examples_runs_on_a_cluster(tmp_path: Path) -> None:
    """Ray copies the folder of the settings to its nodes, and runs the command there."""
    given = tiny_search(write_tiny(tmp_path / "tiny"), tmp_path / "runs" / "search", max_new_tokens=3)
    del given["out"]
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "search.yaml").write_text(json.dumps(given))
    with nodes_that_take_jobs() as nodes:
        done = subprocess.run(
            [EXAMPLE, nodes.jobs, "search.yaml", tmp_path / "runs"],
            cwd=tmp_path / "job",
            env=nodes.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "runs" / "search" / "result.json").read_text())
    assert len(result["trials"]) >= 12
    assert {trial["state"] for trial in result["trials"]} <= {"complete", "pruned"}
    assert "worker ray-0" in done.stdout  # a task of the cluster, not the command alone
