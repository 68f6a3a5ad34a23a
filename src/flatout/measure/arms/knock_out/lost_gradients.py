"""Gradients for parameters that a block of steps computes none for.

A block that is taken away takes its backward pass along, and parameters inside it are left without a
gradient: the optimizer would pass over them.  They are given zeros, so that its work stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flatout.measure.patches import Patches


def keep_gradients(optimizers: Iterable[Any], patches: Patches) -> None:
    """Fill in what every backward pass leaves without a gradient, until the patches are undone."""
    import torch

    parameters = [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    zeros: dict[int, Any] = {}
    backward: Callable[..., Any] = torch.autograd.backward

    def backward_and_fill(*args: Any, **kwargs: Any) -> Any:
        result = backward(*args, **kwargs)
        for parameter in parameters:
            if parameter.grad is None:
                known = zeros.get(id(parameter))
                if known is None:
                    known = zeros[id(parameter)] = torch.zeros_like(parameter)
                parameter.grad = known
        return result

    patches.replace(torch.autograd, "backward", backward_and_fill)
