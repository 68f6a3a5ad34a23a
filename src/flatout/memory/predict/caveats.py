"""What of a forecast is a guess that may be too low.

Of sizes that depend on data, a trace mostly takes the largest there can be; a choice among experts it answers
evenly, and a number that decides something it makes up.  And the kernels that were measured are those of one
generation of GPUs: others follow PyTorch's documented order and the formulas of this one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.hardware.device import Device
    from flatout.memory.trace.record import Guess

MEASURED_CAPABILITY = "9.0"  # an H200
LARGEST_ANSWERS = ("every element", "upper end")  # words of a guess that cannot be too low


def caveats_of(guesses: Collection[Guess], *, device: Device | None) -> tuple[str, ...]:
    """Each caveat as a clause; `device` is None where the job was run on it."""
    open_ones = [guess for guess in guesses if not any(words in guess.answer for words in LARGEST_ANSWERS)]
    caveats = []
    if open_ones:
        answer = min(guess.answer for guess in open_ones)
        places = "a place" if len(open_ones) == 1 else f"{len(open_ones)} places"
        caveats.append(f"what is computed depends on data in {places} ({answer})")
    if device is not None and device.compute_capability is None:
        caveats.append(f"which kernels run on {device.name} is not known")
    elif device is not None and device.compute_capability != MEASURED_CAPABILITY:
        caveats.append(f"the kernels of {device.name} have not been measured")
    return tuple(caveats)
