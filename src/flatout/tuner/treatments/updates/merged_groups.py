"""Merge an optimizer's parameter groups that have the same options.

Each group is updated by separate kernels: a script that makes a group per layer has a step of hundreds of
small ones.
"""

from __future__ import annotations

from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value
from flatout.tuner.treatments.updates.fused_optimizer import LEAST_SHARE, listed

# A script that counts groups, names them or loads their state would find other groups than it made.
KNOWS_GROUPS = ("param_groups[", "load_state_dict", "lr_lambda", "LambdaLR", "add_param_group", "max_lr")


def propose(case: Case) -> list[Value]:
    """Propose it if the script makes groups, never inspects them later, and the optimizer takes a share."""
    evidence = case.evidence
    optimizer_s, step_s = evidence.phase_s("optimizer"), case.own_step_s
    makes = '"params"' in case.source or "'params'" in case.source
    if not makes or any(word in case.source for word in KNOWS_GROUPS):
        return []
    return [True] if optimizer_s and step_s and optimizer_s >= LEAST_SHARE * step_s else []


def install(patches: Patches, _value: Value) -> None:
    import torch

    @patches.around(torch.optim.Optimizer, "__init__")
    def init(real: Any, optimizer: Any, params: Any, defaults: Any) -> None:
        real(optimizer, merge(list(params)), defaults)


def merge(groups: list[Any]) -> list[Any]:
    """Merge neighbouring groups with equal options; the order of parameters stays.

    Anything that is not a group, or names its parameters, stays unchanged.
    """
    if not all(isinstance(group, dict) for group in groups):
        return groups
    merged: list[dict[str, Any]] = []
    for group in groups:
        group = listed(group)
        has_names = any(isinstance(each, tuple) for each in group["params"])
        if merged and not has_names and _options(merged[-1]) == _options(group):
            merged[-1]["params"] += group["params"]
        else:
            merged.append(group)
    return merged


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


TREATMENT = Treatment(
    propose,
    install,
    "update parameter groups with the same options as one",
    safety="reordered",
)
