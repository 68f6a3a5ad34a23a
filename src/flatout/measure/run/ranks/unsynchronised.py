"""Steps in which DistributedDataParallel exchanges no gradients: the cost of the exposed exchange.

Collectives run while backward computes; they cost what remains when backward ends, and what they take from
the computation meanwhile.  Steps under `no_sync` avoid both.  The replicas drift apart from then on, which
changes what they compute but not how long it takes; the diagnosis ends the job afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.lines.live_objects import live_objects


class Unsynchronised(Arm):
    """Keeps the gradients of each rank to itself."""

    kind = label = "unsynchronised"
    suspicion = 1.0
    fewest_rounds = 3

    def __init__(self, replicas: Iterable[Any]) -> None:
        self._replicas = tuple(replicas)
        if any(replica.static_graph for replica in self._replicas):
            self.refusal = "DistributedDataParallel(static_graph=True) exchanges gradients in every step"

    def begin(self) -> None:
        self._exchange(False)

    def end(self) -> None:
        self._exchange(True)

    release = end

    def _exchange(self, value: bool) -> None:
        for replica in self._replicas:
            replica.require_backward_grad_sync = value


def propose(context: ArmContext) -> Iterable[Arm]:
    from torch.nn.parallel import DistributedDataParallel

    kinds: list[type] = [DistributedDataParallel, *DistributedDataParallel.__subclasses__()]
    replicas = [each for each in live_objects(kinds) if each.require_backward_grad_sync]
    return (Unsynchronised(replicas),) if replicas else ()
