"""Outermost model calls by line: how many a step makes, and with how many rows each."""

from __future__ import annotations

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


class ModuleCalls:
    """Filled during the counting steps."""

    def __init__(self, user_code: UserCode) -> None:
        self.user_code = user_code
        self.num_steps = 0
        self._calls: dict[tuple[str, Place], _Calls] = {}

    def note(self, module: Any, args: Any, kwargs: Any, frame: FrameType, spent_s: float) -> None:
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
        calls.rows.add(_leading_rows((*args, *kwargs.values())))

    def evidence(self) -> tuple[ModuleCall, ...]:
        steps = max(1, self.num_steps)
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
            )
            for (module, place), calls in self._calls.items()
        )


def _leading_rows(values: Any) -> int | None:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            # a vector of floats is one sample without a batch; one of whole numbers may be a batch of indices
            return 1 if value.dim() == 1 and value.is_floating_point() else int(value.shape[0])
    return None


def active_autocast() -> str | None:
    """The dtype of the autocast that is on right here, of any device."""
    import torch

    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None
