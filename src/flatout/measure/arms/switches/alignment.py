"""Steps with every weight padded to a size that tensor cores load in whole pieces.

A row of 16-bit numbers is read 16 bytes at a time if its length is a multiple of 8; otherwise the product
falls back to a kernel that reads it number by number.  During a step, weights get rows and columns of zeros
up to the next multiple of 64, and the extra part of the result is cut off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from flatout.measure.arms.arm import COMPILED, Arm, ArmContext
from flatout.measure.clock import Clock, ident
from flatout.measure.patches import Patches
from flatout.measure.phases import has_compiled
from flatout.measure.user_code import UserCode

PIECE, WHOLE = 8, 64  # numbers per load; the multiple that a fix rounds up to
LEAST_SHARE = 0.1  # of the step, in products on tensor cores
LEAST_PART = 0.1  # of all weights, the ones of odd sizes
FREED = 0.5  # of their products' time, about
NARROW = ("bf16", "fp16", "tf32")


class PaddedProducts(Arm):
    """Linear layers of odd sizes, padded."""

    kind = label = "padded-products"

    def __init__(self, user_code: UserCode, clock: Clock, *, suspicion: float) -> None:
        self.suspicion = suspicion
        self._user_code, self._clock = user_code, clock
        self._patches = Patches()
        self._largest = 0

    def begin(self) -> None:
        from torch.nn import functional

        self._patches.replace(functional, "linear", self._padded(functional.linear))

    def step_end(self) -> None:
        if self.place is None:
            self.refusal = "no line of the script calls a layer of an odd size"

    def end(self) -> None:
        self._patches.undo()

    release = end

    def _padded(self, linear: Callable[..., Any]) -> Callable[..., Any]:
        from torch.nn.functional import pad

        def padded(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002 - torch's name
            if not is_odd(weight) or ident() != self._clock.owner:
                return linear(input, weight, bias)
            if weight.numel() > self._largest:
                self._note(weight, self._user_code.place(sys._getframe(1))[0])
            num_out, num_in = weight.shape
            more_out, more_in = -num_out % WHOLE, -num_in % WHOLE
            result = linear(
                pad(input, (0, more_in)) if more_in else input,
                pad(weight, (0, more_in, 0, more_out)),
                pad(bias, (0, more_out)) if bias is not None else None,
            )
            return result[..., :num_out]

        return padded

    def _note(self, weight: Any, place: Any) -> None:
        """Remember the largest layer, which represents all of them."""
        self._largest, self.place = weight.numel(), place
        self.value = " x ".join(map(str, weight.shape))


def is_odd(weight: Any) -> bool:
    """Return whether a weight is a matrix whose rows or columns are not a multiple of PIECE."""
    return weight.dim() == 2 and any(size % PIECE for size in weight.shape)


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose the arm if tensor-core products take a share of the step and weights have odd sizes."""
    kernels = context.kernels
    if context.device != "cuda" or kernels is None or not kernels.step_s:
        return
    share = sum(kernels.matmul_s_by_dtype.get(dtype, 0.0) for dtype in NARROW) / kernels.step_s
    groups = [group for optimizer in context.optimizers for group in optimizer.param_groups]
    weights = [each for group in groups for each in group["params"] if each.dim() == 2]
    odd = sum(weight.numel() for weight in weights if is_odd(weight))
    part = odd / max(1, sum(weight.numel() for weight in weights))
    if share >= LEAST_SHARE and part >= LEAST_PART:
        arm = PaddedProducts(context.user_code, context.clock, suspicion=FREED * min(1.0, share) * part)
        arm.refusal = COMPILED if has_compiled() else None
        yield arm
