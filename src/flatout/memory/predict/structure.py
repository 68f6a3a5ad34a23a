"""Whether two traces are the same step: the same storages born in the same order, and dying alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from flatout.errors import StructureChanges
from flatout.memory.trace.record import Storage, Trace


def compare(base: Trace, trace: Trace) -> None:
    """Raise `StructureChanges` unless both traces are the same births, and between births the same deaths.

    The order of deaths between two births is free: autocast drops its copies in the order of addresses.
    """
    if base is trace:
        return
    for index, (one, other) in enumerate(zip(base.storages, trace.storages, strict=False)):
        if _what(one) != _what(other):
            _refuse(base, trace, f"{storage_name(base, index)} is {storage_name(trace, index)}")
    counts = (len(base.storages), len(trace.storages))
    if counts[0] != counts[1]:
        more = base if counts[0] > counts[1] else trace
        _refuse(base, trace, f"{storage_name(more, min(counts))} is born in one of them only")
    if not np.array_equal(base.events, trace.events):
        _compare_events(base, trace)
    if base.marks != trace.marks:
        _refuse(base, trace, "the phases of the step begin at other events")


def _what(storage: Storage) -> tuple[str | None, ...]:
    return (storage.op, storage.module, storage.phase, storage.component)


def _compare_events(base: Trace, trace: Trace) -> None:
    one, other = _canonical(base.events), _canonical(trace.events)
    shared = min(len(one), len(other))
    differs = np.flatnonzero(one[:shared] != other[:shared])
    if len(differs) or len(one) != len(other):
        position = int(differs[0]) if len(differs) else shared
        event = int((one if len(one) > position else other)[position])
        _refuse(base, trace, f"{storage_name(base, event if event >= 0 else ~event)} is freed elsewhere")


def _canonical(events: NDArray[np.int64]) -> NDArray[np.int64]:
    """Events with the deaths between two births in the order of their storages."""
    births = events >= 0
    return events[np.lexsort((events, ~births, np.cumsum(births)))]


def _refuse(base: Trace, trace: Trace, difference: str) -> NoReturn:
    here, there = show_sizes(base.sizes), show_sizes(trace.sizes)
    raise StructureChanges(
        f"the step allocates otherwise at {there} than at {here}: {difference}",
        hint="trace it at the sizes asked for",
    )


def storage_name(trace: Trace, storage: int) -> str:
    found = trace.storages[storage]
    place = f" of {found.module}" if found.module else ""
    return f"storage {storage} ({found.op}{place}, {found.phase})"


def show_sizes(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sizes.items())
