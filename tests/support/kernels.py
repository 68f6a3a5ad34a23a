"""Triton kernels under test: on a GPU, or in Triton's interpreter on a CPU (`tests/conftest.py` chooses).

Importing this file skips the module that does so where Triton is not installed.  Kernels are imported inside
the tests, after that.  With numpy 2.4 the interpreter needs Triton 3.8.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: CUDA builds of torch bring it")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
needs_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA GPU, or TRITON_INTERPRET=1"
)


class Numbers:
    """Random tensors on the device, the same in every run."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(dtype).to(DEVICE)

    def factor(self, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        """A factor of low-rank noise; int8 numbers are 32 times as large."""
        values = torch.randn(*shape, generator=self._generator)
        return (
            ((values * 32).round().clamp(-127, 127) if dtype == torch.int8 else values).to(dtype).to(DEVICE)
        )


def unit_of(dtype: torch.dtype) -> float:
    """What makes the numbers of `Numbers.factor` of size 1."""
    return 1 / 32 if dtype == torch.int8 else 1.0
