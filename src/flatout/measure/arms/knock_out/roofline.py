"""The least time a block needs: its arithmetic and its bytes at the speed of this device.

Removing a block also removes work that a fix must still do.  Its matrix products and the bytes of its inputs
and results, at the speed that a matrix product and a copy reach on this device, give a floor for that work.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.measure.device.flops import flops_of

PRODUCT_SIZE = {"cpu": 384, "cuda": 4096}
COPY_BYTES = {"cpu": 1 << 24, "cuda": 1 << 27}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
FEWEST_REPEATS, REPEATS_S = 3, 0.05  # at least; other programs may hold a core for several milliseconds
BACKWARD = 3.0  # a product and its two gradients


class FlopCount(TorchDispatchMode):
    """Adds up the floating-point operations of matrix products, convolutions and attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.flops += flops_of(function, args, kwargs or {}, result) or 0.0
        return result


def roofline_s(*, flops: float, num_bytes: float, with_backward: bool, device: str) -> float | None:
    """Return the least seconds that this arithmetic and these bytes need."""
    speeds = device_speeds(device)
    if speeds is None:
        return None
    flops_per_s, bytes_per_s = speeds
    factor = BACKWARD if with_backward else 1.0
    return factor * max(flops / flops_per_s, num_bytes / bytes_per_s)


@functools.cache
def device_speeds(device: str, dtype: str = "fp32") -> tuple[float, float] | None:
    """Measure (floating-point operations, bytes) per second of a matrix product and a copy."""
    if device not in PRODUCT_SIZE or dtype not in DTYPES:
        return None
    try:
        size, length = PRODUCT_SIZE[device], COPY_BYTES[device]
        with torch.no_grad():
            left, right = (torch.ones(size, size, device=device, dtype=DTYPES[dtype]) for _ in range(2))
            product_s = _fastest_s(lambda: left @ right, device)
            source, target = (torch.zeros(length, dtype=torch.uint8, device=device) for _ in range(2))
            copy_s = _fastest_s(lambda: target.copy_(source), device)
    except torch.OutOfMemoryError:
        return None
    return 2 * size**3 / product_s, 2 * length / copy_s


def _fastest_s(work: Any, device: str) -> float:
    times_s: list[float] = []
    while len(times_s) <= FEWEST_REPEATS or sum(times_s) < REPEATS_S:
        _wait(device)
        start_s = time.perf_counter()
        work()
        _wait(device)
        times_s.append(max(1e-9, time.perf_counter() - start_s))
    return min(times_s[1:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
