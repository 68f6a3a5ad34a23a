"""Segments of GPU memory that grow, instead of new ones beside those that are too small.

Batches of many lengths leave holes that no later one fits, until the allocator gives all back and begins
again: a step of the host's and the GPU's waiting.
"""

from __future__ import annotations

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value

NEARLY_FULL = 0.8  # of the GPU's memory


def propose(case: Case) -> list[Value]:
    """On a GPU whose memory is nearly full, or whose batches vary in length."""
    evidence = case.evidence
    if evidence.job.device != "cuda":
        return []
    ragged = any(loader.lengths is not None for loader in evidence.loaders)
    peak = evidence.memory.peak_bytes if evidence.memory is not None else None
    size = evidence.gpu.memory_bytes if evidence.gpu is not None else None
    return [True] if ragged or (peak and size and peak > NEARLY_FULL * size) else []


def install(_patches: Patches, _value: Value) -> None:
    """Before the first allocation: later ones would lie in segments of both kinds."""
    import torch

    if torch.cuda.is_available():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


TREATMENT = Treatment(propose, install, "let segments of GPU memory grow", safety="exact")
