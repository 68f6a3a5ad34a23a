"""Set an optimizer that updates parameter by parameter to update lists of them."""

from __future__ import annotations

import inspect
from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value
from flatout.tuner.treatments.updates.fused_optimizer import LEAST_SHARE


def propose(case: Case) -> list[Value]:
    """Propose it on a GPU if a torch optimizer loops over its parameters and takes a share of the step."""
    evidence = case.evidence
    kernels, optimizer_s, step_s = evidence.kernels, evidence.phase_s("optimizer"), case.own_step_s
    if evidence.job.device != "cuda" or kernels is None or kernels.optimizer != "for-loop":
        return []
    return [True] if optimizer_s and step_s and optimizer_s >= LEAST_SHARE * step_s else []


def install(patches: Patches, _value: Value) -> None:
    import torch

    for each in vars(torch.optim).values():
        if inspect.isclass(each) and "foreach" in inspect.signature(each.__init__).parameters:
            _use_lists(each, patches)


def _use_lists(optimizer_type: Any, patches: Patches) -> None:
    @patches.around(optimizer_type, "__init__")
    def init(real: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("fused") and not kwargs.get("differentiable"):
            kwargs["foreach"] = True
        real(optimizer, *args, **kwargs)


TREATMENT = Treatment(
    propose,
    install,
    "update lists of parameters instead of one after the other",
    safety="reordered",
)
