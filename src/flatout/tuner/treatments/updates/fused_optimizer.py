"""Update all parameters of an optimizer in one kernel.

A script that asks for lists or for a loop (`foreach`) gets the kernel, too: it needs no more memory.
"""

from __future__ import annotations

from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.step_hooks import around_steps
from flatout.tuner.treatment import Case, Treatment, Value

NAMES = ("Adam", "AdamW", "SGD", "Adagrad")
LEAST_SHARE = 0.02  # of the step, in the optimizer
LEAST_IN_BLOCKS = (
    0.005  # the same where blocks of one run show the gain: others may shorten the rest of the step
)


def propose(case: Case) -> list[Value]:
    """Propose it if one of torch's optimizers takes some of the step and is not fused."""
    evidence = case.evidence
    name = (evidence.job.anchor or "").removesuffix(".step")
    optimizer_s, step_s = evidence.phase_s("optimizer"), case.own_step_s
    if name not in NAMES or not optimizer_s or not step_s or optimizer_s < LEAST_IN_BLOCKS * step_s:
        return []
    return [] if evidence.kernels is not None and evidence.kernels.optimizer == "fused" else [True]


def install(patches: Patches, _value: Value) -> None:
    import torch

    for name in NAMES:
        _fuse(getattr(torch.optim, name), patches)


def _fuse(optimizer_type: Any, patches: Patches) -> None:
    @patches.around(optimizer_type, "__init__")
    def init(real: Any, optimizer: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        params = [listed(each) for each in params]
        chosen = kwargs.get("fused") is not None
        if chosen or kwargs.get("differentiable") or not _can_be_fused(params):
            real(optimizer, params, *args, **kwargs)
        else:
            real(optimizer, params, *args, **{**kwargs, "fused": True, "foreach": None})


def listed(group: Any) -> Any:
    """Return a parameter group whose parameters can be iterated more than once; anything else unchanged."""
    if not isinstance(group, dict):
        return group
    params = group["params"]
    return {**group, "params": [params] if hasattr(params, "requires_grad") else list(params)}


def _can_be_fused(params: list[Any]) -> bool:
    tensors = [
        tensor
        for each in params
        for named in (each["params"] if isinstance(each, dict) else [each])
        if hasattr(tensor := named[1] if isinstance(named, tuple) else named, "is_floating_point")
    ]
    devices = {tensor.device.type for tensor in tensors}
    return bool(tensors) and devices <= {"cuda", "cpu"} and all(each.is_floating_point() for each in tensors)


class _Switch:
    """Switches optimizers to fused and back; the kernel needs the step counts on the parameters' device."""

    def __init__(self, patches: Patches, _value: Value) -> None:
        self._seen: dict[int, Any] = {}
        self._fused: list[tuple[Any, dict[str, Any], Any]] = []  # with the `foreach` that the script chose
        around_steps(patches, before=lambda optimizer: self._seen.update({id(optimizer): optimizer}))

    def on(self) -> None:
        import torch

        known = tuple(getattr(torch.optim, name) for name in NAMES)
        for optimizer in (each for each in self._seen.values() if isinstance(each, known)):
            for group in optimizer.param_groups:
                chosen = group.get("fused") is not None
                if not chosen and not group.get("differentiable") and _can_be_fused(group["params"]):
                    self._fused.append((optimizer, group, group.get("foreach")))
                    group["fused"], group["foreach"] = True, False
                    _move_counts(optimizer, group, beside=True)

    def off(self) -> None:
        for optimizer, group, foreach in self._fused:
            group["fused"], group["foreach"] = None, foreach
            _move_counts(optimizer, group, beside=False)
        self._fused = []


def _move_counts(optimizer: Any, group: dict[str, Any], *, beside: bool) -> None:
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        if hasattr(state.get("step"), "to"):
            state["step"] = state["step"].to(parameter.device if beside else "cpu")


TREATMENT = Treatment(
    propose, install, "update all parameters in one kernel", safety="reordered", switch=_Switch
)
