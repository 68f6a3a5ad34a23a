"""Memory that batches are written into.

A large buffer taken fresh from the system costs a page fault per 4 KiB, more than the copy into it.  So
buffers are used again: page-locked ones by torch's host allocator, which waits for the copies that read
them; ordinary ones here, once nothing refers to them.  A worker's batch travels in shared memory, and one
that is written there from the start need not be moved; the process that reads it owns it, so a worker
never sees it again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

ALIGNMENT_BYTES = 64


class Buffers:
    """Hands out uninitialised tensors for the fields of a batch."""

    def __init__(self, *, pinned: bool, reuse: int) -> None:
        self._pinned, self._reuse = pinned, reuse
        self._kept: dict[str, list[npt.NDArray[np.uint8]]] = {}

    def __getstate__(self) -> tuple[bool, int]:
        return self._pinned, self._reuse

    def __setstate__(self, state: tuple[bool, int]) -> None:
        self._pinned, self._reuse = state
        self._kept = {}

    @property
    def plain(self) -> bool:
        """Whether any memory will do."""
        # a forked worker must not ask for CUDA, so the question comes last
        return not self._reuse and get_worker_info() is None and not self._pins

    @property
    def _pins(self) -> bool:
        return self._pinned and torch.cuda.is_available()

    def empty(self, field: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor for `field` that nothing else uses."""
        if get_worker_info() is not None:
            num_bytes = math.prod(shape) * dtype.itemsize
            storage = torch.UntypedStorage._new_shared(num_bytes)
            return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]
        if self._pins:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        if self._reuse:
            return self._idle(field, math.prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))
        return torch.empty(tuple(shape), dtype=dtype)

    def _idle(self, field: str, num_bytes: int) -> Tensor:
        """Bytes of a kept buffer.  The tensor's storage refers to the buffer, and so do all its views."""
        kept = self._kept.setdefault(field, [])
        for number in range(len(kept)):
            if _references(kept, number) == IDLE_REFERENCES:
                if kept[number].nbytes < num_bytes + ALIGNMENT_BYTES:
                    kept[number] = _allocate(num_bytes)
                return _aligned(kept[number], num_bytes)
        buffer = _allocate(num_bytes)
        if len(kept) < self._reuse:
            kept.append(buffer)
        return _aligned(buffer, num_bytes)


def _references(kept: list[npt.NDArray[np.uint8]], number: int) -> int:
    return sys.getrefcount(kept[number])


# What refers to a kept buffer that no batch uses: the list and the question itself, as this Python counts.
IDLE_REFERENCES = _references([np.empty(1, dtype=np.uint8)], 0)


def _allocate(num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.empty(num_bytes + ALIGNMENT_BYTES, dtype=np.uint8)


def _aligned(buffer: npt.NDArray[np.uint8], num_bytes: int) -> Tensor:
    first = -buffer.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(buffer[first : first + num_bytes])
