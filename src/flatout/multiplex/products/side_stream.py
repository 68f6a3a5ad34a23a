"""Work beside the current stream, for products that nothing waits for yet.

A thin product is bound by bytes or, with few tokens, by the time it takes to begin; the base's product beside
it is bound by arithmetic.  On one stream each waits for the one before.  On two they share the GPU: the
coefficients are made while the base's product runs, and the gradients of the factors, which nothing reads
before the update, while the gradient to x is made.

A branch costs the host two waits.  A recorded step pays them once; any other step branches only where its
kernels outlast their launches.

Tensors of the second stream need no care when they are freed: each is made right after that stream has waited
for the current one, so earlier users of its memory are done; and no tensor of the current stream is freed
before `join`.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

BRANCH_TOKENS = 32_768  # of a pass that is not recorded, from which branches outweigh their waits: assumed


class SideStream:
    """A second stream until `join`, or the current one where `side` is None."""

    __slots__ = ("_main", "_side")

    def __init__(self, *, main: Any, side: Any) -> None:
        self._main, self._side = main, side

    def beside(self) -> AbstractContextManager[Any]:
        """Run a block that waits for what the current stream was given so far, and for nothing more."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(self._main)
        return torch.cuda.stream(self._side)

    def join(self) -> None:
        """Let the current stream wait for what ran beside it."""
        if self._side is not None:
            self._main.wait_stream(self._side)


_NONE = SideStream(main=None, side=None)


def branch_for(x_NK: Tensor) -> SideStream:
    """Return a branch of the current stream, where it pays for a pass over these tokens."""
    if not is_bound_by_device(x_NK):
        return _NONE
    return SideStream(main=torch.cuda.current_stream(x_NK.device), side=_side_of(x_NK.device))


def is_bound_by_device(x_NK: Tensor) -> bool:
    """Return whether a pass over these tokens takes the device longer than the host: recorded, or many."""
    return x_NK.is_cuda and (len(x_NK) >= BRANCH_TOKENS or torch.cuda.is_current_stream_capturing())


@functools.cache
def _side_of(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
