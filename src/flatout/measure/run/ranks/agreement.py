"""Several processes, one job: the ranks agree on the plan.

Ranks train in lockstep, so they must switch arms at the same step: rank 0 decides when warm-up is over and
publishes the plan, with a start a few steps ahead, through the store that the process group already has.
Flatout opens no connection of its own.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from typing import Any

from flatout.ground.codec import decode, encode
from flatout.ground.torchrun import read_launch
from flatout.measure.patches import Patches
from flatout.measure.run.step_blocks.schedule import StepBlock

KEY = "flatout/plan"
ATTEMPT = "FLATOUT_ATTEMPT"
LEAD_STEPS = 3


class Agreement:
    """Decides when the plan starts: at once if alone, else at the step that rank 0 names."""

    def __init__(self) -> None:
        self.agreed: tuple[int, list[StepBlock]] | None = None

    @property
    def shared(self) -> bool:
        """Whether other ranks follow the same plan, so that none may leave it."""
        return self.agreed is not None

    @property
    def is_needed(self) -> bool:
        """Whether other ranks train in lockstep with this one."""
        return group_store() is not None

    def plan(self, index: int, ready: bool, make: Callable[[], list[StepBlock]]) -> list[StepBlock] | None:
        """Return the blocks if they start with the step after `index`, else None."""
        store = group_store()
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


def group_store() -> Any:
    """Return the process group's store; None if the job is a single process."""
    if read_launch().num_ranks < 2:
        return None
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def begin_another_attempt() -> None:
    """Prepare to run the job once more under the same launcher, which counts it as the same run."""
    os.environ[ATTEMPT] = str(int(os.environ.get(ATTEMPT, "0")) + 1)


def keep_attempts_apart(patches: Patches) -> None:
    """Separate attempts: the launcher's store outlives one and still holds its addresses and plan."""
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
