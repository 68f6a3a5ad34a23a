"""The variables that a launcher (torchrun, `accelerate launch`, srun) sets for each process of a job.

This is the only place that reads them.  A process that nobody launched is rank 0 of 1.  If torchrun's
variables are absent and srun started the process, SLURM's say the same: `srun flatout evolve ...` needs no
torchrun.  A batch script has most of SLURM's variables too but is one process alone; only the tasks of srun
have a list of the step's nodes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

SLURM_STEP = "SLURM_STEP_NODELIST"
FIRST_PORT, NUM_PORTS = 61_440, 4_096  # a SLURM job meets at a port that its number chooses
NO_ID = "none"  # what torchrun calls a job that was given no --rdzv-id


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """This process among those of its job."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local_ranks: int | None = None  # on this machine; None: the launcher does not say
    node: int | None = (
        None  # of the machine, or of one of several agents on it; None: the launcher does not say
    )
    restarts: int = 0  # how often the job was started again after a crash, or requeued
    is_launched: bool = False
    job: str | None = None  # the launcher's name for the job, the same on all nodes and after restarts
    meets_at: tuple[str, int] | None = None  # host and port where the ranks find each other
    has_store: bool = False  # torchrun's agent serves a store there, which outlives the processes of the job

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks for all."""
        return self.rank == 0


def read_launch(variables: Mapping[str, str] = os.environ) -> Launch:
    """Read who this process is; a variable that is missing or not a number counts as not set."""

    def number(name: str) -> int | None:
        text = variables.get(name, "")
        return int(text) if text.isdigit() else None

    address, port = variables.get("MASTER_ADDR"), number("MASTER_PORT")
    if number("RANK") is None and number("SLURM_PROCID") is not None and SLURM_STEP in variables:
        job, node = number("SLURM_JOB_ID") or 0, number("SLURM_NODEID")
        return Launch(
            rank=number("SLURM_PROCID") or 0,
            num_ranks=number("SLURM_NTASKS") or 1,
            local_rank=number("SLURM_LOCALID") or 0,
            num_local_ranks=_tasks_on(node or 0, variables.get("SLURM_STEP_TASKS_PER_NODE", "")),
            node=node,
            restarts=number("SLURM_RESTART_COUNT") or 0,
            is_launched=True,
            job=f"slurm-{job}" if job else None,
            meets_at=(address or _first_host(variables[SLURM_STEP]), port or FIRST_PORT + job % NUM_PORTS),
        )
    job_id = variables.get("TORCHELASTIC_RUN_ID", NO_ID)
    return Launch(
        rank=number("RANK") or 0,
        num_ranks=number("WORLD_SIZE") or 1,
        local_rank=number("LOCAL_RANK") or 0,
        num_local_ranks=number("LOCAL_WORLD_SIZE") or None,
        node=number("GROUP_RANK"),
        restarts=number("TORCHELASTIC_RESTART_COUNT") or 0,
        is_launched=number("RANK") is not None,
        job=None if job_id == NO_ID else job_id,
        meets_at=(address, port) if address and port else None,
        has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _first_host(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it: gpu07 of gpu[07-12,15],login."""
    found = re.match(r"([^,\[]*)(?:\[([^,\-\]]*)[^\]]*\])?([^,\[]*)", nodes)
    assert found is not None, "every part may be empty"
    return "".join(part or "" for part in found.groups())


def _tasks_on(node: int, counts: str) -> int | None:
    """Return the tasks of one node from a list such as 4(x2),1."""
    found = [
        int(tasks)
        for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
        for _ in range(int(times or 1))
    ]
    return found[node] if node < len(found) else None
