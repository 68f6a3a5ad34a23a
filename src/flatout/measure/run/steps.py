"""Where a step ends.

Any optimizer's `step` marks it; `phases` replaces it in every optimizer class.  With several optimizers the
anchor is the least frequent one (of equals the last to appear), so that D, D, G is one step.  Loops
without an optimizer are marked by backward, loops without either by the outermost model call, of several
models again the least frequent.  An explicit `flatout.step()` outranks all of them; outside a diagnosis that
call does nothing, so a training script may keep it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

EXPLICIT, OPTIMIZER_STEP, BACKWARD_CALL, MODEL_CALL = range(4)
MODEL_CALLED = " call"  # ends the name of an anchor that is a model's call
# Only after this many calls without an optimizer is a loop believed to have none.
PATIENCE = 3
STALE_FACTOR = 64

AnchorKey = tuple[int, int]  # (kind, identity of the optimizer or model)

_listener: Callable[[], None] | None = None


def step() -> None:
    """Mark the end of one step of the job."""
    if _listener is not None:
        _listener()


def listen(listener: Callable[[], None] | None) -> None:
    """Call `listener` at every `flatout.step()`; None stops it."""
    global _listener
    _listener = listener


class Anchor:
    """Counts candidate marks and decides which of them end a step."""

    def __init__(self) -> None:
        self.counts: Counter[AnchorKey] = Counter()
        self.names: dict[AnchorKey, str] = {}
        self.frozen: AnchorKey | None = None
        self._stronger: Counter[AnchorKey] = Counter()

    def add(self, key: AnchorKey, name: str) -> bool:
        """Note one mark; return whether it ends a step."""
        self.counts[key] += 1
        self.names.setdefault(key, name)
        return key == self.current

    def freeze(self) -> None:
        self.frozen = self.current

    @property
    def current(self) -> AnchorKey | None:
        if self.frozen is not None:
            return self.frozen
        if len(self.counts) == 1 and (only := next(iter(self.counts)))[0] <= OPTIMIZER_STEP:
            return only  # in every step of most jobs
        kinds = {kind for kind, _ in self.counts}
        for kind in (EXPLICIT, OPTIMIZER_STEP):
            if kind in kinds:
                return self._least_frequent(kind)
        for kind in (BACKWARD_CALL, MODEL_CALL):
            if any(self.counts[key] > PATIENCE for key in self.counts if key[0] == kind):
                return self._least_frequent(kind, fewest=PATIENCE + 1)
        return None

    def outranks(self, key: AnchorKey) -> bool:
        """Return whether a mark is stronger than the frozen anchor."""
        return self.frozen is not None and key[0] < self.frozen[0]

    def gives_way(self, key: AnchorKey) -> bool:
        """Note a stronger mark; return whether it came before: what was measured is not a step.

        A single one may be the end of training: one `step` of L-BFGS can call its closure a thousand times.
        """
        self._stronger[key] += 1
        return self._stronger[key] > 1

    def _least_frequent(self, kind: int, *, fewest: int = 1) -> AnchorKey:
        # in order of appearance
        keys = [key for key in self.counts if key[0] == kind and self.counts[key] >= fewest]
        most = max(self.counts[key] for key in keys)
        live = [key for key in keys if self.counts[key] * STALE_FACTOR >= most]
        return min(reversed(live), key=lambda key: self.counts[key])

    @property
    def name(self) -> str | None:
        current = self.current
        return None if current is None else self.names[current]
