"""Let segments of GPU memory grow, instead of adding new ones beside those that are too small.

Batches of many lengths leave holes that fit no later batch, until the allocator releases everything and
starts again: the host and the GPU wait for a whole step.
"""

from __future__ import annotations

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value

NEARLY_FULL = 0.8  # of the GPU's memory


def propose(case: Case) -> list[Value]:
    """Propose it on a GPU whose memory is nearly full, or whose batches vary in length."""
    evidence = case.evidence
    if evidence.job.device != "cuda":
        return []
    ragged = any(loader.lengths is not None for loader in evidence.loaders)
    peak = evidence.memory.peak_bytes if evidence.memory is not None else None
    size = evidence.gpu.memory_bytes if evidence.gpu is not None else None
    return [True] if ragged or (peak and size and peak > NEARLY_FULL * size) else []


def install(_patches: Patches, _value: Value) -> None:
    """Set it before the first allocation: later, segments of both kinds would mix."""
    import torch

    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


TREATMENT = Treatment(propose, install, "let segments of GPU memory grow", safety="exact")
