"""Steps on batches that were served before: no loading cost, or only half of the samples."""

from __future__ import annotations

from collections.abc import Iterable

from flatout.measure.arms.arm import ONE_BATCH, Arm, ArmContext
from flatout.measure.arms.batches import batch_statements
from flatout.measure.loading.loaders import LoaderWatch
from flatout.measure.patches import Patches, compile_sizes_apart


class Cached(Arm):
    """Steps on the batches of the previous real block."""

    kind = label = "cached"
    serves = "cached"
    fewest_rounds = 3

    def __init__(self, *, suspicion: float) -> None:
        self.suspicion = suspicion


class OneBatch(Arm):
    """Steps on one and the same batch, for arms that need equal input shapes in every step."""

    kind = label = ONE_BATCH
    serves = "one"
    only_baseline = True


class Half(Arm):
    """Steps on the first half of the kept batches."""

    kind = label = "half"
    baseline = "cached"
    serves = "half"
    suspicion = batch_statements.SUSPICION
    fewest_rounds = 3

    def __init__(self, loaders: LoaderWatch) -> None:
        self._loaders = loaders
        self._patches = Patches()

    def begin(self) -> None:
        compile_sizes_apart(self._patches)

    def end(self) -> None:
        self._patches.undo()

    def step_end(self) -> None:
        self.refusal = self._loaders.cannot_halve


def propose(context: ArmContext) -> Iterable[Arm]:
    if context.loaders.trained_on() is None:
        return batch_statements.propose(context)
    wait = context.phases_s.get("wait", 0.0) / context.step_s
    return Cached(suspicion=max(wait, batch_statements.SUSPICION)), Half(context.loaders), OneBatch()
