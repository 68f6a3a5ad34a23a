"""Python's garbage collector run every so many steps, instead of whenever it likes to."""

from __future__ import annotations

import gc
from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value

STEPS = 100


def propose(_case: Case) -> list[Value]:
    """For any job; most gain nothing, and the trial says so."""
    return [STEPS]


def install(patches: Patches, value: Value) -> None:
    from torch.optim import optimizer as optimizers

    num_steps, every = 0, int(value)

    def after_step(*_: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 1:
            gc.collect()
            gc.freeze()
            gc.disable()
        elif num_steps % every == 0:
            gc.collect()

    handle = optimizers.register_optimizer_step_post_hook(after_step)
    patches.on_undo(handle.remove)
    patches.on_undo(gc.enable)


TREATMENT = Treatment(
    name="garbage-every",
    safety="exact",
    summary="collect garbage every so many steps, not in the middle of one",
    propose=propose,
    install=install,
)
