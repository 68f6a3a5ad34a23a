"""Who proposes arms."""

from __future__ import annotations

from flatout.measure.arms import (
    batched_call,
    kept_batches,
    knock_out,
    leave_out,
    precision,
    reads_free,
    recurrence,
    staged,
    trimmed,
    workers,
)
from flatout.measure.arms.arm import Propose

PROPOSERS: tuple[Propose, ...] = (
    kept_batches.propose,
    knock_out.propose,
    leave_out.propose,
    reads_free.propose,
    precision.propose,
    staged.propose,
    trimmed.propose,
    workers.propose,
    batched_call.propose,
    recurrence.propose,
)
