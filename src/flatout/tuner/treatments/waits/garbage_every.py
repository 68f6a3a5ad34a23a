"""Python's garbage collector, run every 100 steps instead of at any time."""

from __future__ import annotations

import gc
from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.step_hooks import around_steps
from flatout.tuner.treatment import Case, Treatment, Value

STEPS = 100


def propose(_case: Case) -> list[Value]:
    """For any job; most gain nothing, and the trial says so."""
    return [STEPS]


def install(patches: Patches, value: Value) -> None:
    num_steps, every = 0, int(value)

    def after_step(_optimizer: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 1:
            gc.collect()
            gc.freeze()
            gc.disable()
        elif num_steps % every == 0:
            gc.collect()

    around_steps(patches, after=after_step)
    patches.on_undo(gc.enable)


class _Switch:
    """Off, the collector runs as it likes; the steps that it was on are counted together."""

    def __init__(self, patches: Patches, value: Value) -> None:
        self._every, self._num_steps, self._is_on = int(value), 0, False
        around_steps(patches, after=self._after_step)

    def on(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()
        self._is_on = True

    def off(self) -> None:
        self._is_on = False
        gc.enable()
        gc.unfreeze()
        gc.collect()  # what was left lying is not the next block's to clean up

    def _after_step(self, _optimizer: Any) -> None:
        self._num_steps += self._is_on
        if self._is_on and self._num_steps % self._every == 0:
            gc.collect()


TREATMENT = Treatment(
    propose,
    install,
    "collect garbage every so many steps, between steps",
    safety="exact",
    switch=_Switch,
)
