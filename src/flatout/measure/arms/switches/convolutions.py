"""Steps with convolution weights in channels-last layout, as tensor cores need them.

The weight decides the layout of a convolution's result, so activations follow from the first one on.  The
optimizer's state for such a weight changes layout with it: its kernels read all lists of a tensor in one
order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flatout.measure.arms.arm import COMPILED, Arm, ArmContext
from flatout.measure.phases import has_compiled

LEAST_SHARE = 0.1  # of the step, in convolutions
FREED = 0.3  # of their time, about


class ChannelsLast(Arm):
    """Four-dimensional parameters in channels-last layout."""

    kind = label = "channels-last"

    def __init__(self, optimizers: Iterable[Any], *, suspicion: float) -> None:
        self.suspicion = suspicion
        self._optimizers = tuple(optimizers)

    def begin(self) -> None:
        import torch

        self._turn(torch.channels_last)

    def end(self) -> None:
        import torch

        self._turn(torch.contiguous_format)

    def _turn(self, layout: Any) -> None:
        for optimizer in self._optimizers:
            for tensor in images(optimizer):
                tensor.data = tensor.data.contiguous(memory_format=layout)
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.contiguous(memory_format=layout)


def images(optimizer: Any) -> list[Any]:
    """Return four-dimensional parameters, and the optimizer's state for them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor for tensor in (*parameters, *kept) if hasattr(tensor, "dim") and tensor.dim() == 4]


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose the arm on a GPU if convolutions with channels-first weights take a share of the step."""
    kernels = context.kernels
    if context.device != "cuda" or kernels is None or not context.step_s:
        return
    # of an ordinary step: the profiler makes steps longer, but not kernels
    share = kernels.by_category_s.get("convolution", 0.0) / context.step_s
    weights = [tensor for optimizer in context.optimizers for tensor in images(optimizer)]
    if share >= LEAST_SHARE and weights and all(weight.is_contiguous() for weight in weights):
        arm = ChannelsLast(context.optimizers, suspicion=FREED * min(1.0, share))
        arm.refusal = COMPILED if has_compiled() else None
        yield arm
