"""Who proposes arms."""

from __future__ import annotations

from flatout.measure.arms import batched_call, garbage_off, precision, reads_free, recurrence, threads
from flatout.measure.arms.arm import Propose
from flatout.measure.arms.batches import kept_batches, staged, trimmed, whole_batches, workers
from flatout.measure.arms.knock_out import function_blocks, leave_out

PROPOSERS: tuple[Propose, ...] = (
    kept_batches.propose,
    function_blocks.propose,
    leave_out.propose,
    reads_free.propose,
    precision.propose,
    staged.propose,
    trimmed.propose,
    workers.propose,
    whole_batches.propose,
    batched_call.propose,
    recurrence.propose,
    threads.propose,
    garbage_off.propose,
)
