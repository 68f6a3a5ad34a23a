"""Compute the forward and the loss in a 16-bit format, weights and sums in 32 bits.

The whole training thread computes under autocast; optimizers step outside it.  Autocast's cache of 16-bit
weights is cleared at each step, since the weights have changed.  GPUs before Ampere multiply float16 but not
bfloat16; the small range of float16 needs a scaled loss (`_loss_scale`).
"""

from __future__ import annotations

from typing import Any

from flatout.hardware.device import half_format
from flatout.measure.patches import Patches
from flatout.tuner.step_hooks import around_steps
from flatout.tuner.treatment import Case, Treatment, Value, reversible
from flatout.tuner.treatments.arithmetic._loss_scale import LossScale


def propose(case: Case) -> list[Value]:
    """Propose it on GPUs with 16-bit units, if the job computes in 32 bits and does not scale its loss."""
    evidence = case.evidence
    precision, gpu = evidence.precision, evidence.gpu
    if precision is None or precision.autocast or set(precision.parameter_dtypes) != {"float32"}:
        return []
    form = half_format(gpu.compute_capability) if gpu is not None else None
    if form is None or (form == "float16" and "GradScaler" in case.source):
        return []
    return [form]


def install(patches: Patches, value: Value) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    context = torch.autocast(device, dtype=getattr(torch, str(value)))
    context.__enter__()
    patches.on_undo(lambda: context.__exit__(None, None, None))
    if value == "float16":
        LossScale().install(patches)

    def before_step(*_: Any) -> None:
        torch.set_autocast_enabled(device, False)

    def after_step(*_: Any) -> None:
        torch.set_autocast_enabled(device, True)
        torch.clear_autocast_cache()

    around_steps(patches, before=before_step, after=after_step)


TREATMENT = Treatment(
    propose,
    install,
    "compute the forward in 16 bits, weights and sums in 32 bits",
    safety="lossy",
    switch=reversible(install),
)
