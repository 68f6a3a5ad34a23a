"""Triton kernels under test: on a GPU, or in Triton's interpreter on a CPU (`tests/conftest.py` chooses).

Importing this file skips the module that does so where Triton is not installed.  Kernels are imported inside
the tests, after that.  With numpy 2.4 the interpreter needs Triton 3.8.
"""

from __future__ import annotations

import os
from typing import Any

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


def _patch_once_a_launch() -> None:
    """Let the interpreter prepare Triton's language once for a launch.

    Left to itself it does so again for every device function that a program calls: a third of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[tuple[int, ...]] = set()

    def patch_once(function: Any) -> Any:
        seen = tuple(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if seen in done:
            return interpreter._LangPatchScope()
        done.add(seen)
        return patch(function)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh


if INTERPRETED:
    _patch_once_a_launch()
