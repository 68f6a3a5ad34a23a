"""Who proposes arms."""

from __future__ import annotations

from flatout.measure.arms import kept_batches, leave_out
from flatout.measure.arms.arm import Propose

PROPOSERS: tuple[Propose, ...] = (
    kept_batches.propose,
    leave_out.propose,
)
