"""Several processes, one job: the ranks agree on the plan, and their evidence becomes one.

Ranks train in lockstep, so they must switch arms at the same step: rank 0 decides when warm-up is over
and publishes the plan, with a start a few steps ahead, through the store that the process group already
has.  Nothing of ours opens a connection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flatout.ground.codec import decode, encode
from flatout.ground.errors import EvidenceUnreadable
from flatout.ground.torchrun import read_launch
from flatout.ground.units import show_seconds
from flatout.measure import PHASES
from flatout.measure.evidence import Evidence, Rank
from flatout.measure.evidence_file import load_evidence
from flatout.measure.patches import Patches
from flatout.measure.run.schedule import StepBlock

KEY = "flatout/plan"
ATTEMPT = "FLATOUT_ATTEMPT"
LEAD_STEPS = 3
WAIT_FOR_RANKS_S = 60.0
UNWATCHED = "processes that the script started"
LEAST_UNWATCHED_S = 1.0


def unwatched_processes() -> str | None:
    """Where a script that took no step itself left the work, as with torch.multiprocessing.spawn."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    if cpu_s < LEAST_UNWATCHED_S:
        return None
    return (
        f"{UNWATCHED} computed for {show_seconds(cpu_s)}, and only the script itself is watched; "
        "torchrun -m flatout diagnose watches every rank it starts"
    )


class Agreement:
    """Decides when the plan starts: at once when alone, else at the step rank 0 names."""

    def __init__(self) -> None:
        self.agreed: tuple[int, list[StepBlock]] | None = None

    @property
    def shared(self) -> bool:
        """Other ranks follow the same plan, so nobody may leave it."""
        return self.agreed is not None

    @property
    def is_needed(self) -> bool:
        """Whether other ranks train in lockstep with this one."""
        return _store() is not None

    def plan(self, index: int, ready: bool, make: Callable[[], list[StepBlock]]) -> list[StepBlock] | None:
        """The blocks once they are to start with the step after `index`, else None."""
        store = _store()
        if store is None:
            return make() if ready else None
        if self.agreed is None:
            if read_launch().rank == 0 and ready:
                blocks = make()
                self.agreed = (index + LEAD_STEPS, blocks)
                store.set(KEY, json.dumps([self.agreed[0], encode(blocks)]))
            elif read_launch().rank != 0 and store.check([KEY]):
                start, blocks_data = json.loads(store.get(KEY))
                self.agreed = (int(start), [decode(StepBlock, block) for block in blocks_data])
        if self.agreed is not None and index >= self.agreed[0]:
            return self.agreed[1]
        return None


def _store() -> Any:
    """The process group's store; None when the job is a single process."""
    if read_launch().num_ranks < 2:
        return None
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def shared_folder() -> Path:
    """Where the ranks of this launch leave their evidence for each other; the same for all on a host."""
    parts = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    name = "-".join(part.replace("/", "_") for part in parts if part) or str(os.getppid())
    return Path(tempfile.gettempdir()) / f"flatout-{os.getuid()}-{name}"


def partial_path(folder: Path) -> Path:
    """Where this rank's evidence grows while its process runs; nobody else reads it there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("rank", "partial"):
        (folder / f"{name}-{read_launch().rank}.json").unlink(missing_ok=True)
    return folder / f"partial-{read_launch().rank}.json"


def publish(partial: Path) -> Path:
    """Hand this rank's evidence to rank 0: the process is over and the file complete."""
    return partial.replace(partial.with_name(f"rank-{read_launch().rank}.json"))


def clear(folder: Path) -> None:
    """Remove what the ranks left for each other."""
    for path in folder.glob("rank-*.json"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def begin_another_attempt() -> None:
    """Before the job runs once more under the same launcher, which counts it as the same run."""
    os.environ[ATTEMPT] = str(int(os.environ.get(ATTEMPT, "0")) + 1)


def keep_attempts_apart(patches: Patches) -> None:
    """The launcher's store outlives an attempt and still holds its addresses and its plan."""
    attempt = os.environ.get(ATTEMPT)
    if attempt is None or read_launch().num_ranks < 2:
        return
    from torch.distributed.distributed_c10d import PrefixStore

    # the package hides its module behind the function of the same name
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    make: Callable[..., Any] = rendezvous._create_c10d_store

    def make_apart(*args: Any, **kwargs: Any) -> Any:
        return PrefixStore(f"flatout/{attempt}", make(*args, **kwargs))

    patches.replace(rendezvous, "_create_c10d_store", make_apart)


def gather(own: Evidence, folder: Path, *, timeout_s: float = WAIT_FOR_RANKS_S) -> Evidence:
    """Rank 0's evidence with what the other ranks of this host left in `folder`."""
    expected = read_launch().num_local_ranks or read_launch().num_ranks
    others: dict[int, Evidence] = {}
    deadline = time.monotonic() + timeout_s
    while len(others) < expected - 1 and time.monotonic() < deadline:
        for path in folder.glob("rank-*.json"):
            number = int(path.stem.partition("-")[2])
            if number != own.job.rank and number not in others:
                try:
                    others[number] = load_evidence(path)
                except EvidenceUnreadable:
                    continue
        time.sleep(0.05)
    return merge([own, *others.values()], world_size=read_launch().num_ranks)


def merge(evidence: Sequence[Evidence], *, world_size: int) -> Evidence:
    """One Evidence of a job's ranks: the slowest rank's figures, with all ranks side by side.

    Everybody waits for the slowest, so its findings are the job's.
    """
    own = min(evidence, key=lambda each: each.job.rank)
    missing = list(own.missing)
    if len(evidence) < world_size:
        missing.append(f"ranks: evidence of {len(evidence)} of {world_size} ranks was found on this host")
    ranks = tuple(rank_summary(each) for each in sorted(evidence, key=lambda each: each.job.rank))
    slowest = max(evidence, key=_own_work_s)
    return dataclasses.replace(
        slowest,
        job=dataclasses.replace(own.job, rank=slowest.job.rank, world_size=world_size),
        ranks=ranks,
        missing=tuple(missing),
    )


def _own_work_s(evidence: Evidence) -> float:
    """A rank's own time: waiting for the others shows in backward, where gradients are exchanged."""
    return (evidence.step_s or 0.0) - (evidence.phase_s("backward") or 0.0)


def rank_summary(evidence: Evidence) -> Rank:
    return Rank(
        rank=evidence.job.rank,
        step_s=evidence.step_s,
        phases_s={phase: evidence.phase_s(phase) or 0.0 for phase in PHASES},
        ended=evidence.job.ended,
        host=socket.gethostname(),
    )
