"""Steps in which one model call records no gradients, because nothing uses them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from flatout.measure.arms.arm import COMPILED, Arm, ArmContext
from flatout.measure.clock import Clock, ident
from flatout.measure.evidence import Place
from flatout.measure.patches import Patches
from flatout.measure.phases import has_compiled
from flatout.measure.user_code import UserCode

LEAST_SHARE = 0.03  # of the step


class NoGrad(Arm):
    """A model called under `torch.no_grad()` at one line."""

    kind = "no-grad"

    def __init__(
        self, user_code: UserCode, clock: Clock, kinds: Iterable[type], *, place: Place, suspicion: float
    ) -> None:
        self.label, self.place, self.suspicion = f"{self.kind} {place}", place, suspicion
        self.last_line = place.line
        self._user_code, self._clock, self._kinds = user_code, clock, tuple(kinds)
        self._patches = Patches()

    def begin(self) -> None:
        for kind in self._kinds:
            self._patches.replace(kind, "__call__", self._call(kind.__call__))

    def end(self) -> None:
        self._patches.undo()

    release = end

    def _call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def without_gradients(module: Any, *args: Any, **kwargs: Any) -> Any:
            here = ident() == self._clock.owner
            if not here or self._user_code.place(sys._getframe(1))[0] != self.place:
                return call(module, *args, **kwargs)
            with torch.no_grad():
                return call(module, *args, **kwargs)

        return without_gradients


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose calls that record gradients for parameters that no optimizer has."""
    for found in context.module_calls:
        share = (found.host_s or 0.0) / context.step_s
        if found.unused_gradients and share >= LEAST_SHARE:
            kinds = [kind for kind in context.outermost_types if kind.__name__ == found.module]
            arm = NoGrad(
                context.user_code, context.clock, kinds, place=found.place, suspicion=min(1.0, 2 * share)
            )
            arm.refusal = COMPILED if has_compiled() else None
            yield arm
