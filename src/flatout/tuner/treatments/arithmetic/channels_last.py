"""Store images with their channels last, as convolution kernels need them."""

from __future__ import annotations

from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.first_call import Inputs, on_first_call
from flatout.tuner.treatment import Case, Treatment, Value

LEAST_SHARE = 0.1  # of the step, in convolutions


def propose(case: Case) -> list[Value]:
    """Propose it if convolutions take a share of the step."""
    kernels, step_s = case.evidence.kernels, case.own_step_s
    if kernels is None or not step_s:
        return []
    return [True] if kernels.by_category_s.get("convolution", 0.0) >= LEAST_SHARE * step_s else []


def install(patches: Patches, _value: Value) -> None:
    import torch

    def turn(value: Any) -> Any:
        is_image = isinstance(value, torch.Tensor) and value.ndim == 4
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    def turn_all(inputs: Inputs) -> Inputs:
        args, kwargs = inputs
        return tuple(map(turn, args)), {name: turn(value) for name, value in kwargs.items()}

    on_first_call(patches, lambda module: module.to(memory_format=torch.channels_last), change=turn_all)


TREATMENT = Treatment(
    propose, install, "keep images and convolutions in the layout that kernels want", safety="reordered"
)
