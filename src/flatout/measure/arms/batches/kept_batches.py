"""Steps on batches that were served before: no loading cost, or only half of the samples."""

from __future__ import annotations

from collections.abc import Iterable

from flatout.measure.arms.arm import ONE_BATCH, Arm, ArmContext
from flatout.measure.arms.batches import batch_statements
from flatout.measure.loading.loaders import LoaderWatch
from flatout.measure.patches import Patches, compile_sizes_apart


class OnKeptBatches(Arm):
    """Steps on kept batches; those before the first of them, on a batch of an earlier block, do not count."""

    fewest_rounds = 3

    def __init__(self, loaders: LoaderWatch, *, suspicion: float) -> None:
        self._loaders, self.suspicion = loaders, suspicion

    def step_end(self) -> None:
        self.fell_back = not self._loaders.num_served

    def end(self) -> None:
        if not self._loaders.num_served:
            self.refusal = self.refusal or "its steps take no batch from the loader"


class Cached(OnKeptBatches):
    """Steps on the batches of the previous real block."""

    kind = label = "cached"
    serves = "cached"


class OneBatch(Arm):
    """Steps on one and the same batch, for arms that need equal input shapes in every step."""

    kind = label = ONE_BATCH
    serves = "one"
    only_baseline = True


class Half(OnKeptBatches):
    """Steps on the first half of the kept batches."""

    kind = label = "half"
    baseline = "cached"
    serves = "half"

    def __init__(self, loaders: LoaderWatch) -> None:
        super().__init__(loaders, suspicion=batch_statements.SUSPICION)
        self._patches = Patches()

    def begin(self) -> None:
        compile_sizes_apart(self._patches)

    def end(self) -> None:
        super().end()
        self._patches.undo()

    def step_end(self) -> None:
        super().step_end()
        self.refusal = self._loaders.cannot_halve


def propose(context: ArmContext) -> Iterable[Arm]:
    if context.loaders.trained_on() is None:
        return batch_statements.propose(context)
    wait = context.phases_s.get("wait", 0.0) / context.step_s
    cached = Cached(context.loaders, suspicion=max(wait, batch_statements.SUSPICION))
    return cached, Half(context.loaders), OneBatch()
