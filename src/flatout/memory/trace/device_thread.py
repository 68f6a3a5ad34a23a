"""Compute gradients that are differentiated again in a separate thread, as CUDA does.

Autograd runs the backward of CUDA tensors in a thread for each device, that of CPU tensors in the thread that
asks.  Where it makes a graph of gradients (`create_graph`), each thread numbers the nodes it makes by itself,
and of several nodes that are ready autograd takes the one with the highest number.  So the order of a second
backward, and with it what is held at once, depends on how many nodes either thread has made.  After some
steps, the thread that makes more nodes per step is far ahead, and the order no longer changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

CREATE_GRAPH = 2  # the place of it among the arguments of autograd's engine, after the tensors
NUM_STEPS = 50  # after which one thread is ahead of the other by more than a step has nodes
MOST_MADE = 200_000


class DeviceThread:
    """The thread of a device that is not there."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.ident = pool.submit(threading.get_ident).result()
        self.made_graphs = False
        self.before = self._numbers()

    def run(self, engine: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # what torch.func wraps around tensors (vmap, jacrev, hessian) holds in the thread that wrapped them
        if not args[CREATE_GRAPH] or threading.get_ident() == self.ident or _in_torch_func():
            return engine(tensors, *args, **kwargs)
        self.made_graphs = True
        contexts = [*_get_current_dispatch_mode_stack(), *_autocasts()]
        return self.pool.submit(_within, contexts, engine, tensors, *args, **kwargs).result()

    def go_on(self) -> None:
        """Number the nodes as they are after many steps like the traced one."""
        here, there = (after - before for after, before in zip(self._numbers(), self.before, strict=True))
        ahead = min(NUM_STEPS * abs(there - here), MOST_MADE)
        if there > here:
            self.pool.submit(_make_nodes, ahead).result()
        else:
            _make_nodes(ahead)

    def _numbers(self) -> tuple[int, int]:
        return _make_nodes(1), self.pool.submit(_make_nodes, 1).result()


@contextmanager
def device_thread() -> Iterator[DeviceThread]:
    """Make graphs of gradients in one other thread, within the block."""
    autograd: Any = torch.autograd
    engine: Callable[..., Any] = autograd._engine_run_backward
    with ThreadPoolExecutor(max_workers=1) as pool:
        thread = DeviceThread(pool)
        autograd._engine_run_backward = lambda *args, **kwargs: thread.run(engine, *args, **kwargs)
        try:
            yield thread
        finally:
            autograd._engine_run_backward = engine


def _in_torch_func() -> bool:
    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None


def _make_nodes(count: int) -> int:
    """Make `count` nodes of autograd in this thread; return the number of the last."""
    x = torch.ones(1, requires_grad=True)
    made = [x.view(1).grad_fn for _ in range(count)][-1:]
    return int(made[0]._sequence_nr()) if made and made[0] is not None else 0


def _within(contexts: list[Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        # Autograd's own thread takes autocast over without entering it: the outermost exit would forget
        # which weights are cast already, for all threads.
        torch.autocast_increment_nesting()
        stack.callback(torch.autocast_decrement_nesting)
        for context in contexts:
            stack.enter_context(context)
        return function(*args, **kwargs)


def _autocasts() -> list[Any]:
    return [
        torch.autocast(kind, dtype=torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
