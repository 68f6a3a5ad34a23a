"""Run Python's garbage collector every 100 steps instead of at any time.

If a script collects after each step, its calls are skipped; if it asks twice between two steps, in an
evaluation for instance, they run.  At the exit everything is collected as ever: libraries count what is left
then, and call it a leak.
"""

from __future__ import annotations

import atexit
import gc
from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.step_hooks import around_steps
from flatout.tuner.treatment import Case, Treatment, Value

STEPS = 100


def propose(_case: Case) -> list[Value]:
    """Propose it for any job; most gain nothing, and the trial shows it."""
    return [STEPS]


class _Switch:
    """Switches the collector between automatic and periodic; counts the periodic steps across blocks."""

    def __init__(self, patches: Patches, value: Value) -> None:
        self._every, self._num_steps, self._is_on = int(value), 0, False
        self._asked_at: int | None = None  # the step after which the script last asked for a collection
        real = self._collect = gc.collect

        def collect(generation: int = 2) -> int:
            is_new = self._asked_at != self._num_steps
            self._asked_at = self._num_steps
            return 0 if self._is_on and is_new else real(generation)

        patches.replace(gc, "collect", collect)
        around_steps(patches, after=self._after_step)

    def on(self) -> None:
        self._collect()
        gc.freeze()
        gc.disable()
        self._is_on = True

    def off(self) -> None:
        self._is_on = False
        gc.enable()
        gc.unfreeze()
        self._collect()  # the next block must not pay for this garbage

    def _after_step(self, _optimizer: Any) -> None:
        self._num_steps += self._is_on
        if self._is_on and self._num_steps % self._every == 0:
            self._collect()


def install(patches: Patches, value: Value) -> None:
    """Freeze what exists at the first step: later collections skip the model and the data."""
    switch = _Switch(patches, value)
    is_begun = False

    def after_step(_optimizer: Any) -> None:
        nonlocal is_begun
        if not is_begun:
            is_begun = True
            switch.on()

    def restore() -> None:
        gc.enable()
        gc.unfreeze()

    around_steps(patches, after=after_step)
    patches.on_undo(restore)
    atexit.register(restore)


TREATMENT = Treatment(
    propose,
    install,
    "collect garbage every so many steps, between steps",
    safety="exact",
    switch=_Switch,
    suits_any=True,
)
