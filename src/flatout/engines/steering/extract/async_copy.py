"""Results copied from the device to the host while the device works.

On a GPU each result is copied into page-locked memory on a stream of its own, and a thread of its own waits
for it and hands it on: the host can hardly launch the kernels of a small model fast enough, and has no time
to sort results.  It waits only when four more batches have been handed to the GPU.  Elsewhere a result is
handed on at once.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

SWITCH_S = 0.0001
PENDING = 4  # copies in flight: short texts come faster than they are sorted, long ones make up for it


@contextmanager
def prioritise_launches() -> Iterator[None]:
    """Keep other threads and the garbage collector from holding up the thread that launches kernels.

    Every launched operator lets other threads run, and would then wait 5 ms, Python's default, for one that
    tokenises or sorts results: a GPU runs dry while a thousand launches wait.  So threads take turns fifty
    times as often.  A full garbage collection walks all objects of the process, which takes 0.2 s where
    transformers is imported: objects that exist before the block are left out of it until its end.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_S))
    freezes = gc.get_freeze_count() == 0  # else the caller has frozen them, and means them to stay so
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        sys.setswitchinterval(before)


class AsyncCopy:
    """Copies results to the host and hands them on in the order they were taken.

    `on_copied(rows, values)` gets what `take` got, one call at a time; the values are its own to keep.  What
    it raises is raised by a later `take`, or at the end of the block.
    """

    def __init__(self, on_copied: Callable[[Sequence[int], Tensor], None]) -> None:
        self._on_copied = on_copied
        self._pending: deque[Future[None]] = deque()
        self._streams: dict[torch.device, Any] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flatout-copies")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Hand on everything that was taken, also where an error ended the block."""
        self._thread.shutdown(wait=True)
        if kind is None:
            while self._pending:
                self._pending.popleft().result()

    def take(self, rows: Sequence[int], values: Tensor) -> None:
        """Begin to copy `values` [rows, ...] to the host."""
        if values.device.type != "cuda":
            self._on_copied(rows, values.cpu())
            return
        if values.device not in self._streams:
            self._streams[values.device] = torch.cuda.Stream(values.device)
        stream = self._streams[values.device]
        stream.wait_stream(torch.cuda.current_stream(values.device))
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(values, non_blocking=True)
            copied = stream.record_event()
        values.record_stream(stream)  # its memory is not given to the next batch before the copy is done
        self._pending.append(self._thread.submit(self._hand_on, copied, rows, host))
        while len(self._pending) > PENDING:
            self._pending.popleft().result()

    def _hand_on(self, copied: Any, rows: Sequence[int], host: Tensor) -> None:
        copied.synchronize()
        self._on_copied(rows, host)
