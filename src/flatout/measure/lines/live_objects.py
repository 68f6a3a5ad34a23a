"""Walk the garbage collector's objects without harming the threads that make them.

A tuple is in the collector's list while another thread still fills it, and filling it fails ("bad argument to
internal function") as long as anyone else refers to it: walking that list can break an unrelated thread.  So
a walk keeps no reference while other threads can run.  `live_objects` filters by type inside one call of C
code, in which the interpreter never switches threads.  That code calls no audited function, such as `id`: a
library may have installed an audit hook (filelock, which torch needs, does), and hooks are Python code.  Work
that needs Python code in between, like following referrers, runs `alone`.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, compress, tee
from typing import Any

LONGEST_ALONE_S = 5.0
OLDER = (1, 2)  # generations
BEHIND = [None] * 200  # more than a `tee` still keeps of a list: its last block of 57 values


def live_objects(types: Iterable[type]) -> list[Any]:
    """Return all objects known to the collector whose type is exactly one of `types`, which exclude tuple."""
    number_of: Any = object.__hash__  # one per object; `hash` would ask a metaclass, and `id` is audited
    wanted = frozenset(map(number_of, types))
    if number_of(tuple) in wanted:
        raise ValueError("a tuple may be under construction in another thread")
    with without_collection():
        gc.collect(0)  # all objects get older than the iterators below, which must not find themselves
        call: Any = operator.call
        lists = [part for each in OLDER for part in (partial(gc.get_objects, each), BEHIND.copy)]
        objects, again = tee(chain.from_iterable(map(call, lists)))
        is_wanted = map(wanted.__contains__, map(number_of, map(type, again)))
        return list(compress(objects, is_wanted))  # the walk begins and ends in this call


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let no other thread run Python code during the block, which must not read files, wait or print.

    The interpreter switches threads when one asks for it after an interval, or when C code releases its lock.
    A thread that is already waiting asks once more after the old interval, so it runs first.
    """
    before_s = sys.getswitchinterval()
    if threading.active_count() == 1:
        yield
        return
    sys.setswitchinterval(LONGEST_ALONE_S)
    try:
        let_through = time.perf_counter() + 2 * before_s
        while time.perf_counter() < let_through:
            pass
        with without_collection():
            yield
    finally:
        sys.setswitchinterval(before_s)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage during the block: a collection runs finalizers, which are Python code."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def with_subclasses(kind: type) -> Iterator[type]:
    """Yield a class and all its subclasses."""
    yield kind
    derived: type
    for derived in kind.__subclasses__():
        yield from with_subclasses(derived)
