"""Steps whose operators use fewer threads, if the job has more threads than cores.

Threads beyond the number of cores take turns, and an operator ends when its last thread does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.arms.batches.workers import read_cores
from flatout.measure.evidence import Place
from flatout.measure.process.threads import ThreadsWatch

SUSPICION = 0.5  # of the step: no other instrument sees the cost of too many threads


class FewerThreads(Arm):
    """Operators on the CPU with `num` threads."""

    kind = "threads"

    def __init__(self, watch: ThreadsWatch, *, num: int, place: Place | None) -> None:
        self.label, self.value = f"threads={num}", float(num)
        self.suspicion, self.place = SUSPICION, place
        self._watch, self._num = watch, num

    def begin(self) -> None:
        import torch

        self._watch.held = torch.get_num_threads()
        torch.set_num_threads(self._num)

    def end(self) -> None:
        import torch

        if self._watch.held is not None:
            torch.set_num_threads(self._watch.held)
        self._watch.held = None


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose as many threads as cores, and one thread, if the job computes on the CPU."""
    present, cores = context.process.threads.evidence(), read_cores()
    if context.device != "cpu" or present is None or not cores or present.num <= cores:
        return
    for num in sorted({1, max(1, math.floor(cores))}):
        yield FewerThreads(context.process.threads, num=num, place=present.place)
