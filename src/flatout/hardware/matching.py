"""Find the datasheet of a GPU by the name its driver gives it.

NVML and torch report the same string, such as "NVIDIA A100-SXM4-80GB" or "Tesla T4".  A match is on the
whole name, never on a part of it: an "RTX 4090 Laptop GPU" is not an RTX 4090, and a wrong peak is worse
than none.
"""

from __future__ import annotations

import functools
import itertools
import re

from flatout.hardware.datasheet import Datasheet
from flatout.hardware.datasheet_rows import ROWS

GROUP = "flatout.datasheets"

# A board of the same name whose memory differs by more than this is another board, or a part of one.
MEMORY_TOLERANCE = 0.15

# Words that drivers put around the name that sets a board apart.
NOISE_WORDS = frozenset({"nvidia", "tesla", "geforce", "amd", "instinct", "generation", "oam"})


@functools.cache
def all_datasheets() -> tuple[Datasheet, ...]:
    """Return every GPU of the table, by vendor and generation, then those that other packages add.

    A package adds some by an entry point of the group `flatout.datasheets`: one Datasheet, or several.
    """
    from flatout.ground.user_code import load_plugins  # here: it takes as long as the rest of the room

    added = ((each,) if isinstance(each, Datasheet) else each for each in load_plugins(GROUP).values())
    return (*ROWS, *itertools.chain.from_iterable(added))


def find_datasheet(name: str, *, memory_bytes: int | None = None) -> Datasheet | None:
    """Find the row of a GPU by its driver's name; None if no row is certain.

    Some names cover boards with different memory (two kinds of RTX 3080): memory decides between them,
    and rejects a name whose memory fits none, such as a slice of a GPU in a virtual machine.
    """
    rows = _by_driver_name().get(plain_name(name), ())
    if memory_bytes is None:
        return rows[0] if len(rows) == 1 else None
    return min(
        (row for row in rows if _memory_error(row, memory_bytes) <= MEMORY_TOLERANCE),
        key=lambda row: _memory_error(row, memory_bytes),
        default=None,
    )


def plain_name(name: str) -> str:
    """Strip case, punctuation and brand words: "NVIDIA A100-SXM4-80GB" -> "a100sxm480gb"."""
    words = re.findall(r"[a-z0-9]+", name.casefold())
    return "".join(word for word in words if word not in NOISE_WORDS)


@functools.cache
def _by_driver_name() -> dict[str, tuple[Datasheet, ...]]:
    names: dict[str, tuple[Datasheet, ...]] = {}
    for row in all_datasheets():
        for name in {plain_name(name) for name in row.driver_names}:
            names[name] = (*names.get(name, ()), row)
    return names


def _memory_error(row: Datasheet, memory_bytes: int) -> float:
    return abs(row.memory_bytes - memory_bytes) / row.memory_bytes
