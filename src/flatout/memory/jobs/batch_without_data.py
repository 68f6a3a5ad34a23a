"""A batch whose large tensors have no data.

A trace needs the shapes of a batch, and of its integers the values.  Floats of a few gigabytes would fill the
host for nothing, so an operation of the batch maker whose result is larger than `LARGEST` elements gives a
fake tensor instead, and so does everything that is computed from one.  The size is known before the operation
runs: it is at most the product of the numbers in its arguments, and where that is large, shapes alone tell.

A batch maker that reads values of such a tensor (`numpy()`, `item()`) is run again, with data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flatout.memory.jobs.job import Job, Sizes

LARGEST = 1 << 25  # elements with data


def make_batch(job: Job, sizes: Sizes, *, mode: FakeTensorMode | None = None) -> Any:
    """Make one batch of `job`; tensors larger than `LARGEST` belong to `mode`."""
    large = _LargeWithoutData(mode or FakeTensorMode(allow_non_fake_inputs=True))
    state = torch.get_rng_state()
    try:
        with large:
            return job.make_batch(**sizes)
    except Exception:
        if not large.num_made:
            raise
    torch.set_rng_state(state)
    return job.make_batch(**sizes)


class _LargeWithoutData(TorchDispatchMode):
    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.num_made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(each, FakeTensor) for each in tensors) or self._is_large(func, args, kwargs):
            self.num_made += 1
            with self.fake:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _is_large(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func.is_view or func._schema.is_mutable or _most_elements(args, kwargs) <= LARGEST:
            return False
        try:
            with self.fake:
                found = func(*args, **kwargs)
        except RuntimeError:  # its size depends on values
            return False
        return any(isinstance(leaf, Tensor) and leaf.numel() > LARGEST for leaf in tree_iter(found))


def _most_elements(args: Any, kwargs: Any) -> int:
    """Return about the largest result these arguments can have: the product of all their sizes."""
    found = 1
    for leaf in tree_iter((args, kwargs)):
        if isinstance(leaf, Tensor):
            found *= max(1, leaf.numel())
        elif type(leaf) is int and leaf > 0:
            found *= leaf
    return found
