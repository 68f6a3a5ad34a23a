"""The forward and the loss in a 16-bit format, weights and sums in 32 bits.

The whole training thread computes under autocast; optimizers step outside it.  What autocast keeps of the
weights in 16 bits is forgotten at each step, since the weights have changed.
"""

from __future__ import annotations

from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.step_hooks import around_steps
from flatout.tuner.treatment import Case, Treatment, Value, reversible


def propose(case: Case) -> list[Value]:
    """On GPUs with bf16 units, where the job computes in 32 bits."""
    evidence = case.evidence
    precision = evidence.precision
    if precision is None or precision.autocast or not precision.bf16_supported:
        return []
    return ["bfloat16"] if set(precision.parameter_dtypes) == {"float32"} else []


def install(patches: Patches, value: Value) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    context = torch.autocast(device, dtype=getattr(torch, str(value)))
    context.__enter__()
    patches.on_undo(lambda: context.__exit__(None, None, None))

    def before_step(*_: Any) -> None:
        torch.set_autocast_enabled(device, False)

    def after_step(*_: Any) -> None:
        torch.set_autocast_enabled(device, True)
        torch.clear_autocast_cache()

    around_steps(patches, before=before_step, after=after_step)


TREATMENT = Treatment(
    name="autocast",
    safety="lossy",
    summary="compute the forward in bf16, weights and sums in 32 bits",
    propose=propose,
    install=install,
    switch=reversible(install),
    rules=("no-mixed-precision",),
)
