"""Memory that batches are written into.

A large new buffer costs a page fault per 4 KiB, more than the copy into it.  So buffers are reused:
page-locked ones by torch's host allocator, which waits for the copies that read them; ordinary ones here,
once nothing refers to them.  A worker sends its batch in shared memory, so it is written there from the
start; the process that reads it owns it, and the worker never sees it again.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from flatout.data.rows.padding import Array

ALIGNMENT_BYTES = 64
# Without a number of buffers to keep, fields from this size on keep two: the one a step reads, the one being
# written.  Smaller fields mostly get the C library's memory back with its pages in place.
KEPT_BYTES = 2**20
KEPT_BUFFERS = 2


class Buffers:
    """Hands out uninitialised tensors for the fields of a batch.

    `reuse` is the number of buffers kept per field; None keeps two of large fields and none of small ones.
    With `stays` they hold intermediate results, which no worker sends.
    """

    def __init__(self, *, pinned: bool, reuse: int | None, stays: bool = False) -> None:
        self._pinned, self._reuse, self._stays = pinned, reuse, stays
        self._kept: dict[str, list[npt.NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"pinned": self._pinned, "reuse": self._reuse, "stays": self._stays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def plain(self, num_bytes: int) -> bool:
        """Return whether any memory will do for a field of this size."""
        # last, because a forked worker must not ask for CUDA
        return not self._num_kept(num_bytes) and not self._shares and not self._pins

    def _num_kept(self, num_bytes: int) -> int:
        if self._reuse is None:
            return KEPT_BUFFERS if num_bytes >= KEPT_BYTES else 0
        return self._reuse

    @property
    def _shares(self) -> bool:
        return get_worker_info() is not None and not self._stays

    @property
    def _pins(self) -> bool:
        return self._pinned and torch.cuda.is_available()

    def empty(self, field: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor for `field` that nothing else uses."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._shares:
            storage = torch.UntypedStorage._new_shared(num_bytes)
            return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]
        if self._pins:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        if self._num_kept(num_bytes):
            with self._lock:  # or two threads find the same buffer idle
                kept = self._idle(field, num_bytes)
            return kept.view(dtype).view(tuple(shape))
        return torch.empty(tuple(shape), dtype=dtype)

    def _idle(self, field: str, num_bytes: int) -> Tensor:
        """Return bytes of an idle buffer; the storage and all views of the tensor refer to the buffer."""
        kept = self._kept.setdefault(field, [])
        for number in range(len(kept)):
            if _references(kept, number) == IDLE_REFERENCES:
                if kept[number].nbytes < num_bytes + ALIGNMENT_BYTES:
                    kept[number] = _allocate(num_bytes)
                return _aligned(kept[number], num_bytes)
        buffer = _allocate(num_bytes)
        if len(kept) < self._num_kept(num_bytes):
            kept.append(buffer)
        return _aligned(buffer, num_bytes)


def send(values: Array | Tensor, device: torch.device | str) -> Tensor:
    """Copy values of the host to a device, without waiting for what runs there."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _references(kept: list[npt.NDArray[np.uint8]], number: int) -> int:
    return sys.getrefcount(kept[number])


# What refers to a kept buffer that no batch uses: the list and the question itself, as this Python counts.
IDLE_REFERENCES = _references([np.empty(1, dtype=np.uint8)], 0)


def _allocate(num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.empty(num_bytes + ALIGNMENT_BYTES, dtype=np.uint8)


def _aligned(buffer: npt.NDArray[np.uint8], num_bytes: int) -> Tensor:
    first = -buffer.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(buffer[first : first + num_bytes])
