"""In which numbers the frozen encoder computes.

Adapters, heads and their optimizer stay in float32 everywhere.  The encoder's products, nearly all of the
work, take the fastest format that the device multiplies in hardware: bfloat16 from compute capability 8.0
on; float16 before (a T4 is 7.5), whose gradients below 6e-8 become zero, so that losses are scaled; float32
on a CPU.
"""

from __future__ import annotations

from typing import Literal

from flatout.decisions import Decision

Precision = Literal["float32", "bfloat16", "float16"]
BFLOAT16_FROM = (8, 0)
FLOAT16_FROM = (7, 0)  # tensor cores begin with Volta


def choose_precision(
    wanted: Literal["auto"] | Precision, *, device_type: str, capability: tuple[int, int] | None
) -> Decision[Precision]:
    """The format for a device; `capability` is that of a CUDA device, None elsewhere."""
    if wanted != "auto":
        return Decision(value=wanted, reason="it was given", source="assumed")
    if device_type != "cuda" or capability is None:
        return Decision(value="float32", reason=f"a {device_type} gains nothing from less", source="assumed")
    name = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= BFLOAT16_FROM:
        return Decision(value="bfloat16", reason=f"{name} multiplies it in hardware", source="datasheet")
    if capability >= FLOAT16_FROM:
        reason = f"{name} multiplies it in hardware and has no bfloat16; losses are scaled"
        return Decision(value="float16", reason=reason, source="datasheet")
    return Decision(value="float32", reason=f"{name} has no tensor cores", source="datasheet")


def needs_scaler(precision: Precision) -> bool:
    """Whether losses must be scaled so that small gradients survive."""
    return precision == "float16"
