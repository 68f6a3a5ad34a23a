"""Steps whose optimizer walks its parameters in another way.

A torch optimizer updates one parameter group after the other, and a group tensor by tensor, list by list
(`foreach`) or in one kernel (`fused`): the same formula with fewer calls.  The changed groups exist only
while `step` runs, because schedulers count groups; their options are read in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flatout.measure.arms.arm import COMPILED, Arm, ArmContext
from flatout.measure.evidence import OptimizerSetup, Place
from flatout.measure.patches import Patches
from flatout.measure.phases import has_compiled

CAN_FUSE = ("Adam", "AdamW", "SGD", "Adagrad")
LEAST_SHARE = 0.05  # of the step, in the optimizer
FEWEST_SAVED = 8  # groups that merging removes
FEWEST_TENSORS = 8
MERGED, FOREACH, FUSED = "merged-groups", "foreach-optimizer", "fused-optimizer"
FREED = {MERGED: 0.8, FOREACH: 0.6, FUSED: 0.8}  # of the optimizer's time, about


class OptimizerStep(Arm):
    """Merges parameter groups, or updates them as lists or in one kernel."""

    def __init__(
        self, optimizers: Sequence[Any], *, kind: str, suspicion: float, place: Place | None = None
    ) -> None:
        self.kind = self.label = kind
        self.suspicion, self.place = suspicion, place
        self._optimizers = list(optimizers)
        self._patches = Patches()
        self._own: list[tuple[Any, Any]] = []  # (optimizer, its groups) while it steps
        self._moved: list[tuple[dict[str, Any], Any]] = []  # (state, the device of its step counter)

    def begin(self) -> None:
        for optimizer in self._optimizers:
            before = optimizer.register_step_pre_hook(self._change)
            after = optimizer.register_step_post_hook(lambda *_: self._put_back())
            self._patches.on_undo(before.remove)
            self._patches.on_undo(after.remove)
            if self.kind == FUSED:
                self._move_step_numbers(optimizer)

    def end(self) -> None:
        self._patches.undo()
        self._put_back()
        for state, device in self._moved:
            state["step"] = state["step"].to(device)
        self._moved.clear()

    def release(self) -> None:
        self._patches.undo()

    def _change(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._own.append((optimizer, optimizer.param_groups))
        groups = optimizer.param_groups
        if self.kind == MERGED:
            optimizer.param_groups = merged(groups, optimizer.defaults)
        else:
            options = {"fused": self.kind == FUSED, "foreach": self.kind == FOREACH}
            optimizer.param_groups = [{**group, **options} for group in groups]

    def _put_back(self) -> None:
        while self._own:
            optimizer, groups = self._own.pop()
            optimizer.param_groups = groups

    def _move_step_numbers(self, optimizer: Any) -> None:
        """Move step counters to the parameters' device, where a fused kernel expects them."""
        for parameter, state in optimizer.state.items():
            number = state.get("step")
            if hasattr(number, "device") and number.device != parameter.device:
                self._moved.append((state, number.device))
                state["step"] = number.to(parameter.device)


def merged(groups: Sequence[dict[str, Any]], options: Iterable[str]) -> list[dict[str, Any]]:
    """Merge groups with equal options."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for group in groups:
        key = _options(group, options)
        if key in found:
            found[key]["params"] = [*found[key]["params"], *group["params"]]
        else:
            found[key] = {name: value for name, value in group.items() if name != "param_names"}
    return list(found.values())


def _options(group: dict[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    values = (group.get(name) for name in names)
    return tuple(f"tensor {id(value)}" if hasattr(value, "data_ptr") else repr(value) for value in values)


def describe(optimizer: Any, place: Place | None) -> OptimizerSetup:
    """Describe an optimizer's setup."""
    groups = optimizer.param_groups
    tensors = [parameter for group in groups for parameter in group["params"]]
    return OptimizerSetup(
        name=type(optimizer).__name__,
        place=place,
        num_groups=len(groups),
        num_distinct=len({_options(group, optimizer.defaults) for group in groups}),
        num_tensors=len(tensors),
        way=_way(optimizer, tensors),
    )


def _way(optimizer: Any, tensors: Sequence[Any]) -> str | None:
    groups = optimizer.param_groups
    if not type(optimizer).__module__.startswith("torch.optim") or not tensors:
        return None
    if any("foreach" not in group or group.get("differentiable") for group in groups):
        return None
    if any(group.get("fused") for group in groups):
        return "fused"
    asked = {group["foreach"] for group in groups}
    if asked == {None}:  # torch's own choice
        return "foreach" if all(tensor.is_cuda for tensor in tensors) else "default"
    return "foreach" if asked == {True} else "for-loop"


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose arms if many groups or tensors can explain the optimizer's share of the step."""
    share = context.phases_s.get("optimizer", 0.0) / context.step_s
    if share < LEAST_SHARE:
        return
    known = {optimizer: describe(optimizer, context.made_at(optimizer)) for optimizer in context.optimizers}
    for kind in (MERGED, FUSED, FOREACH):
        chosen = [optimizer for optimizer, setup in known.items() if is_for(kind, setup, context.device)]
        if chosen:
            arm = OptimizerStep(
                chosen, kind=kind, suspicion=FREED[kind] * min(1.0, share), place=known[chosen[0]].place
            )
            arm.refusal = COMPILED if has_compiled() else None
            yield arm


def is_for(kind: str, setup: OptimizerSetup, device: str) -> bool:
    """Return whether this arm would change how the optimizer steps."""
    if kind == MERGED:
        return setup.way is not None and setup.num_groups - setup.num_distinct >= FEWEST_SAVED
    if setup.num_tensors < FEWEST_TENSORS or setup.way not in ("for-loop", "foreach"):
        return False
    if kind == FUSED:
        return setup.name in CAN_FUSE and (setup.way == "for-loop" or device == "cuda")
    return setup.way == "for-loop"
