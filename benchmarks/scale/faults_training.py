"""What faults cost `flatout evolve` and `flatout adapt train` on two nodes: iterations lost, and done again.

    python benchmarks/scale/faults_training.py [--verb evolve] [--stall 30] [--save]

Two torchrun agents on this machine are the nodes.  Every fault comes in the middle of a run.  `lost` counts
iterations that are missing from the log at the end, or all of them where the weights are not those of one
undisturbed process, bit for bit.  `again` counts iterations that were finished, and were computed once more.
All of it happens in a network namespace, whose only link is a loopback that can be taken down: root needed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path[0:0] = [str(HERE), str(HERE.parent)]
from interleaved import arguments, report  # noqa: E402
from nodes import ENVIRONMENT, VERBS, Job  # noqa: E402

RECORDS_BEFORE = 23  # when the fault comes: between two checkpoints of either verb


def kill_worker(node: int) -> Callable[[Job, float], None]:
    """SIGKILL to one rank; its agent starts all ranks again."""

    def fault(job: Job, _stall_s: float) -> None:
        for worker in job.workers(node):
            worker.kill()

    return fault


def kill_agent(node: int) -> Callable[[Job, float], None]:
    """SIGKILL to a node: agent and rank; the agent is started again."""

    def fault(job: Job, _stall_s: float) -> None:
        workers = job.workers(node)
        job.agents[node].kill()
        for worker in workers:
            worker.kill()
        job.agents[node].wait()
        job.start(node)

    return fault


def kill_only_agent(job: Job, _stall_s: float) -> None:
    """SIGKILL to an agent alone: its rank must not go on as an orphan."""
    job.agents[1].kill()
    job.agents[1].wait()
    job.start(1)


def kill_all(job: Job, _stall_s: float) -> None:
    """SIGKILL to everything; the job is started again with --resume."""
    processes = [process for node in (0, 1) for process in job.workers(node)]
    for agent in job.agents.values():
        agent.kill()
    for process in processes:
        process.kill()
    for agent in job.agents.values():
        agent.wait()
    job.restart_all("--resume")


def stall(job: Job, stall_s: float) -> None:
    """SIGSTOP to a node, agent and rank, and SIGCONT after a while."""
    stopped = [job.agents[1].pid, *(worker.pid for worker in job.workers(1))]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in stopped:
            subprocess.run(["kill", f"-{number}", str(pid)], check=True)
        if number == signal.SIGSTOP:
            time.sleep(stall_s)


def stall_network(_job: Job, stall_s: float) -> None:
    """Take the link between the nodes down, and up after a while."""
    for state, pause_s in (("down", stall_s), ("up", 0.0)):
        subprocess.run(["ip", "link", "set", "lo", state], check=True)
        time.sleep(pause_s)


FAULTS: dict[str, tuple[str, Callable[[Job, float], None]]] = {
    "kill -9 of a rank": ("2", kill_worker(1)),
    "kill -9 of the first rank": ("2", kill_worker(0)),
    "kill -9 of an agent, its rank orphaned": ("1:2", kill_only_agent),
    "kill -9 of a node, started again": ("1:2", kill_agent(1)),
    "kill -9 of both nodes, --resume": ("2", kill_all),
    "a node stalls": ("2", stall),
    "the network stalls": ("2", stall_network),
}


def weights(out: Path) -> dict[str, Any]:
    """All tensors of the last checkpoint of every phase."""
    last = {path.parent.parent: path.parent for path in sorted(out.rglob("state.json"))}
    found = {}
    for folder in last.values():
        for path in folder.glob("*.safetensors"):
            found |= {f"{path.relative_to(out)}/{name}": each for name, each in load_file(path).items()}
    return found


def key_of(record: dict[str, Any]) -> tuple[Any, ...]:
    return record.get("phase"), record.get("step", record.get("epoch"))


def judge(job: Job, whole: Path, wanted: set[tuple[Any, ...]]) -> dict[str, int]:
    left, right = weights(job.out), weights(whole)
    same = left.keys() == right.keys() and all(left[name].equal(right[name]) for name in right)
    times = Counter(key_of(record) for record in job.records())
    lost = len(wanted - times.keys()) if same else len(wanted)
    return {"iterations": len(wanted), "lost": lost, "again": sum(times.values()) - len(times)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--verb", choices=[*VERBS], action="append")
    parser.add_argument("--stall", type=float, default=30.0, help="seconds (default: 30)")
    parser.add_argument("--fault", choices=[*FAULTS], action="append", help="all, where none is named")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.inside:
        own = ["sh", sys.executable, *sys.argv, "--inside"]
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', *own])
    with tempfile.TemporaryDirectory() as name:
        for verb in given.verb or VERBS:
            folder = Path(name) / verb
            folder.mkdir()
            rows = faults_of(verb, folder, faults=given.fault or [*FAULTS], stall_s=given.stall)
            if given.save and given.fault:
                rows = merge_saved(f"faults-{verb}", rows)
            report(f"faults-{verb}", {"stall_s": given.stall, "rows": rows}, folder=HERE, save=given.save)


def merge_saved(subject: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all faults: those that were measured again, and the others as they were saved."""
    saved = sorted((HERE / "results").glob(f"{subject}_*.json"))
    known = json.loads(saved[-1].read_text())["rows"] if saved else []
    found = {row["fault"]: row for row in [*known, *rows]}
    return [found[fault] for fault in FAULTS if fault in found]


def faults_of(verb: str, folder: Path, *, faults: list[str], stall_s: float) -> list[dict[str, Any]]:
    """A row for every fault, each in a run of its own."""
    settings = VERBS[verb][1](folder)
    one = Job(verb, settings, folder / "one")
    subprocess.run(one.command, env=ENVIRONMENT, check=True, capture_output=True)
    wanted = {key_of(record) for record in one.records()}
    rows = []
    for number, fault in enumerate(faults):
        nodes, cause = FAULTS[fault]
        job = Job(verb, settings, folder / f"run{number}", nodes=nodes)
        job.start_all()
        job.wait_for(RECORDS_BEFORE)
        cause(job, stall_s)
        job.finish()
        rows.append({"fault": fault, **judge(job, one.out, wanted)})
        print(json.dumps({"verb": verb, **rows[-1]}), flush=True)
    return rows


if __name__ == "__main__":
    main()
