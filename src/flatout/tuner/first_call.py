"""Find the models that a script trains, at their first call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from flatout.measure.patches import Patches

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def on_first_call(
    patches: Patches,
    act: Callable[[Any], None],
    *,
    change: Callable[[Inputs], Inputs] = lambda inputs: inputs,
) -> None:
    """Call `act(module)` before the first call of each outermost module with trainable parameters.

    Modules that are called inside another one are part of it.  `change` replaces the inputs of such a module
    at every call.
    """
    from torch import nn

    real = nn.Module.__call__
    trained: dict[int, bool] = {}
    inside = threading.local()

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "depth", 0):
            return real(module, *args, **kwargs)
        if id(module) not in trained:
            trained[id(module)] = module.training and any(each.requires_grad for each in module.parameters())
            if trained[id(module)]:
                act(module)
        if trained[id(module)]:
            args, kwargs = change((args, kwargs))
        inside.depth = 1
        try:
            return real(module, *args, **kwargs)
        finally:
            inside.depth = 0

    patches.replace(nn.Module, "__call__", call)
