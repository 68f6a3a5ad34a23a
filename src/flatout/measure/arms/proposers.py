"""The modules that propose arms."""

from __future__ import annotations

from flatout.measure.arms import (
    batched_call,
    garbage_off,
    precision,
    reads_free,
    recurrence,
    threads,
    unwatched,
)
from flatout.measure.arms.arm import Propose
from flatout.measure.arms.batches import kept_batches, staged, trimmed, whole_batches, workers
from flatout.measure.arms.knock_out import function_blocks, leave_out
from flatout.measure.arms.switches import (
    alignment,
    attention,
    checkpointing,
    convolutions,
    ignored_calls,
    no_grad,
    optimizer_step,
    uncompiled,
)

PROPOSERS: tuple[Propose, ...] = (
    unwatched.propose,
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
    optimizer_step.propose,
    ignored_calls.propose,
    checkpointing.propose,
    no_grad.propose,
    uncompiled.propose,
    convolutions.propose,
    attention.propose,
    alignment.propose,
)
