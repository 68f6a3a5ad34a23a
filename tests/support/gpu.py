"""A GPU that tests share with each other, and perhaps with other processes."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator

BLOCK_BYTES = 2**30
TRIES = 5


def rise_of_memory(used_bytes: Callable[[], int | None]) -> int:
    """By how many bytes an allocation of BLOCK_BYTES made `used_bytes` rise.

    Blocks that earlier tests left in torch's cache are given back first: the allocation would be served
    from them.  What another process frees meanwhile hides the rise, so a small one is tried again.
    """
    import torch

    rises = []
    for _ in range(TRIES):
        gc.collect()
        torch.zeros(1, device="cuda:0")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = used_bytes()
        block = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda:0")
        after = used_bytes()
        assert before is not None and after is not None
        rises.append(after - before)
        del block
        if rises[-1] >= 0.9 * BLOCK_BYTES:
            break
    return max(rises)


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Let any wait for the GPU raise."""
    import torch

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype, once per process
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
