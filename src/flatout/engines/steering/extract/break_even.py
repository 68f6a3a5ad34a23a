"""When storing activations beats computing them again.

Storing costs one write and a read for every use; recomputing costs a pass for every use after the first,
which has to be computed either way.  Last-token activations are small (2000 texts of a model with 32 layers
of width 4096 are 0.5 GB in bf16) and cost a pass over long texts: they pay at once.  Whole sequences are
hundreds of times larger for the same pass, and often do not pay at all.
"""

from __future__ import annotations

import math

from flatout.decisions import Decision, Source
from flatout.errors import BadInput
from flatout.units import show_bytes, show_seconds

# Of a plain local disk, where nothing was measured: what a SATA SSD sustains.
ASSUMED_BYTES_PER_S = 500e6


def storing_pays(
    *,
    num_bytes: int,
    recompute_s: float,
    uses: int,
    write_bytes_per_s: float | None = None,
    read_bytes_per_s: float | None = None,
) -> Decision[bool]:
    """Decide whether to store activations that are used `uses` times again."""
    if num_bytes < 0 or recompute_s < 0 or uses < 0:
        raise BadInput(f"num_bytes={num_bytes}, recompute_s={recompute_s} and uses={uses} start at 0")
    measured = write_bytes_per_s is not None and read_bytes_per_s is not None
    source: Source = "measured" if measured else "assumed"
    write_s = num_bytes / (write_bytes_per_s or ASSUMED_BYTES_PER_S)
    read_s = num_bytes / (read_bytes_per_s or ASSUMED_BYTES_PER_S)
    costs = (
        f"{show_bytes(num_bytes)} take {show_seconds(write_s)} to write and {show_seconds(read_s)} to read,"
        f" computing them takes {show_seconds(recompute_s)}"
    )
    if read_s >= recompute_s:
        return Decision(value=False, reason=f"{costs}: reading never beats computing", source=source)
    needed = max(1, math.ceil(write_s / (recompute_s - read_s)))
    reason = f"{costs}: storing pays from use {needed} on, and {uses} are expected"
    return Decision(value=uses >= needed, reason=reason, source=source)
