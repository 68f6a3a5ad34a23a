"""Merge an optimizer's parameter groups that have the same options.

Each group is updated by separate kernels: a script that makes a group per layer has a step of hundreds of
small ones.  Groups of weights and of biases often alternate, so groups merge across others; trials compare
parameters in the order in which the script gave them.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from flatout.measure.arms.switches.optimizer_step import merged
from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value
from flatout.tuner.treatments.updates.fused_optimizer import LEAST_SHARE, listed

# A script that counts groups, names them or loads their state would find other groups than it made.
KNOWS_GROUPS = ("param_groups[", "load_state_dict", "lr_lambda", "LambdaLR", "add_param_group", "max_lr")


_order: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # of the parameters of merged optimizers


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
        groups = [listed(group) for group in params]
        fewer = merge(groups)
        real(optimizer, fewer, defaults)
        if fewer is not groups:
            _order[optimizer] = [each for group in groups for each in group["params"]]


def parameters_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's parameters in the order of the script's groups."""
    now = [each for group in optimizer.param_groups for each in group["params"]]
    given = _order.get(optimizer, ())
    known = {id(each) for each in given}
    return [*given, *(each for each in now if id(each) not in known)]


def merge(groups: list[Any]) -> list[Any]:
    """Merge groups with equal options, each into the first of them.

    Return `groups` itself if one of them is not a group or names its parameters.
    """
    if not all(isinstance(group, dict) for group in groups) or any(
        isinstance(each, tuple) for group in groups for each in group["params"]
    ):
        return groups
    return merged(groups, sorted({name for group in groups for name in group} - {"params"}))


TREATMENT = Treatment(
    propose,
    install,
    "update parameter groups with the same options as one",
    safety="reordered",
)
