"""Outermost model calls by line: how many per step, and with how many rows each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from flatout.measure.evidence import ModuleCall, Place
from flatout.measure.user_code import UserCode


@dataclass(slots=True)
class _Calls:
    calls: int = 0
    host_s: float = 0.0
    rows: set[int | None] = field(default_factory=set)
    training: bool = False
    has_parameters: bool = False
    autocast: str | None = None
    modules: set[int] = field(default_factory=set)
    shapes: set[tuple[Any, ...]] = field(default_factory=set)  # of the modules' parameters
    in_turn: bool = False  # one gets what another has computed, or a transform takes what it computes
    records: bool = False  # gradients of what was computed from plain inputs
    reached: bool = False  # a backward pass reached what was computed here
    parameters: set[int] = field(default_factory=set)


class ModuleCalls:
    """Outermost model calls, filled during the counting steps."""

    def __init__(self, user_code: UserCode) -> None:
        self.user_code = user_code
        self.num_steps = 0
        self._calls: dict[tuple[str, Place], _Calls] = {}

    def note(
        self, module: Any, args: Any, kwargs: Any, result: Any, frame: FrameType, spent_s: float
    ) -> None:
        place, _via = self.user_code.place(frame)
        if place is None:
            return
        calls = self._calls.setdefault((type(module).__name__, place), _Calls())
        if calls.calls == 0:
            calls.has_parameters = next(module.parameters(), None) is not None
            calls.autocast = active_autocast()
        calls.calls += 1
        calls.host_s += spent_s
        calls.training |= bool(module.training)
        given = (*args, *kwargs.values())
        calls.rows.add(leading_rows(given))
        if id(module) not in calls.modules:
            calls.modules.add(id(module))
            calls.shapes.add(tuple(each.shape for each in module.parameters()))
            calls.parameters |= {id(each) for each in module.parameters()}
        if is_transformed() or any(getattr(value, "requires_grad", False) for value in given):
            calls.in_turn = True
        elif (computed := _first_recorded(result)) is not None:
            calls.records = True

            def note_reached(_gradient: Any) -> None:
                calls.reached = True

            computed.register_hook(note_reached)

    def evidence(self, optimizers: Iterable[Any] = ()) -> tuple[ModuleCall, ...]:
        """Return calls per step; `optimizers` show which gradients are used."""
        steps = max(1, self.num_steps)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        training = [each for each in self._calls.values() if each.training and each.reached]
        learning = trained & {parameter for each in training for parameter in each.parameters}
        return tuple(
            ModuleCall(
                module=module,
                place=place,
                calls_per_step=calls.calls / steps,
                rows=next(iter(calls.rows)) if len(calls.rows) == 1 else None,
                training=calls.training,
                has_parameters=calls.has_parameters,
                autocast=calls.autocast,
                host_s=calls.host_s / steps,
                num_alike=1 if calls.in_turn or len(calls.shapes) > 1 else max(1, len(calls.modules)),
                unused_gradients=calls.records
                and not calls.in_turn
                and bool(trained)
                and not (calls.reached and calls.parameters & trained),
                evaluates=not (calls.training or calls.reached or calls.in_turn)
                and bool(calls.parameters & learning),
            )
            for (module, place), calls in self._calls.items()
        )


def _first_recorded(result: Any) -> Any:
    """Return a tensor in a result through which gradients would flow."""
    values = result.values() if isinstance(result, dict) else result
    for value in values if isinstance(result, (dict, tuple, list)) else (result,):
        if getattr(value, "grad_fn", None) is not None:
            return value
    return None


def is_transformed() -> bool:
    """Return whether a transform of torch.func is active: `grad` needs what is recorded inside it."""
    import torch

    return torch._C._functorch.peek_interpreter_stack() is not None


def leading_rows(values: Any) -> int | None:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            # a float vector is one sample without a batch; an integer vector may be a batch of indices
            return 1 if value.dim() == 1 and value.is_floating_point() else int(value.shape[0])
    return None


def active_autocast() -> str | None:
    """Return the dtype of the autocast that is active here, on any device."""
    import torch

    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None
