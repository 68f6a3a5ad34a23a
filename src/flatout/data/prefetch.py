"""Batches copied to the GPU ahead of their use.

A copy runs beside the GPU's kernels if it starts from page-locked memory on its own stream.  The step then
waits for an event that has already happened.  Hand-written code gets two things wrong: the allocator gives
the memory of a batch to the next copy while a kernel still reads it, because it knows only the stream that
allocated it (so the reading stream is recorded here); and a loader error or an early `break` leaves a thread
behind.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from flatout.ground.errors import BadInput, FlatoutError
from flatout.measure.batches import arrays_of, map_arrays

Batch = TypeVar("Batch")


class Prefetched(Generic[Batch]):
    """A loader whose batches are on a device before they are needed; made by `prefetch`."""

    def __init__(
        self, loader: Iterable[Batch], device: torch.device | str, *, ahead: int, background: bool
    ) -> None:
        if ahead < 1:
            raise BadInput(f"ahead={ahead} must be at least 1")
        self.loader, self.device = loader, torch.device(device)
        self._ahead, self._background = ahead, background

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without one says so itself

    def __iter__(self) -> Iterator[Batch]:
        copies: _Copies | _Moves = (_Copies if self.device.type == "cuda" else _Moves)(self.device)
        source = _in_background if self._background else _in_turn
        # Without a thread, nothing overlaps with a copy to a device that is not a GPU: it is made when due.
        ahead = self._ahead if self._background or self.device.type == "cuda" else 0
        waiting = source(self.loader, copies.send, ahead)
        try:
            for sent in waiting:
                yield copies.receive(sent)
        finally:
            waiting.close()


def prefetch(
    loader: Iterable[Batch], device: torch.device | str, *, ahead: int = 2, background: bool = False
) -> Prefetched[Batch]:
    """Copy batches to `device` on a stream of their own, `ahead` of their use.

    Batches are tensors in any nesting; those not in page-locked memory are copied there first.  With
    `background` a thread also loads them: for loops that wait for the GPU in every step (a `loss.item()`)
    and for loaders without workers.  On the CPU batches are handed through.
    """
    return Prefetched(loader, device, ahead=ahead, background=background)


class _Sent(NamedTuple):
    batch: Any
    done: torch.cuda.Event | None


class _Moves:
    """Makes plain copies, for devices without streams; on the CPU, passes batches on as they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, batch: Any) -> _Sent:
        if self._device.type == "cpu":
            return _Sent(batch, None)
        moved = map_arrays(
            batch, lambda array: array.to(self._device) if isinstance(array, Tensor) else array
        )
        return _Sent(moved, None)

    def receive(self, sent: _Sent) -> Any:
        return sent.batch


class _Copies:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, batch: Any) -> _Sent:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            moved = map_arrays(batch, self._copy)
            done = torch.cuda.Event()
            done.record(self._stream)
        return _Sent(moved, done)

    def _copy(self, array: Any) -> Any:
        if not isinstance(array, Tensor) or array.device == self._device:
            return array
        if array.device.type == "cpu" and not array.is_pinned():
            # torch's host allocator keeps this copy until the device has read it
            array = array.pin_memory()
        return array.to(self._device, non_blocking=True)

    def receive(self, sent: _Sent) -> Any:
        """Return the batch, ready for use on the current stream."""
        current = torch.cuda.current_stream(self._device)
        assert sent.done is not None
        current.wait_event(sent.done)
        for array in arrays_of(sent.batch):
            if isinstance(array, Tensor) and array.is_cuda:
                array.record_stream(current)
        return sent.batch


def _in_turn(loader: Iterable[Any], send: Callable[[Any], _Sent], ahead: int) -> Generator[_Sent, None, None]:
    """Send batches before they are due, between two steps of the loop."""
    batches = _batches(loader)
    sent: deque[_Sent] = deque()
    try:
        for batch in batches:
            sent.append(send(batch))
            del batch
            if len(sent) > ahead:
                yield sent.popleft()
        while sent:
            yield sent.popleft()
    finally:
        batches.close()


class _Failed(NamedTuple):
    error: BaseException


def _in_background(
    loader: Iterable[Any], send: Callable[[Any], _Sent], ahead: int
) -> Generator[_Sent, None, None]:
    """Load and send batches on a thread."""
    ready: queue.Queue[_Sent | _Failed | None] = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(item: _Sent | _Failed | None) -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        batches = _batches(loader)
        try:
            for batch in batches:
                put(send(batch))
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001  handed to the loop, which raises it
            put(_Failed(error))
        finally:
            batches.close()

    thread = threading.Thread(target=work, name="flatout-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, _Failed):
                raise item.error
            yield item
            del item
    finally:
        stopped.set()
        thread.join()


def _batches(loader: Iterable[Any]) -> Generator[Any, None, None]:
    """Yield the loader's batches; name a worker that ended before its batch was read."""
    try:
        yield from loader
    except (ConnectionError, EOFError) as error:
        raise FlatoutError(
            "a DataLoader worker ended before its batch was read",
            hint="often for lack of memory: try fewer workers; num_workers=0 shows the worker's own error",
        ) from error
