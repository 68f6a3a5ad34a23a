"""Keep activations that the script recomputes in the backward pass.

Checkpointing buys memory with a second forward.  A GPU with room for the activations need not pay; on a GPU
without, the trial runs out of memory, and the treatment is dropped.
"""

from __future__ import annotations

from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value

WORDS = ("torch.utils.checkpoint", "utils.checkpoint import", "gradient_checkpointing")
NEARLY_FULL = 0.7  # of the GPU's memory: beyond it there is no room for activations


def propose(case: Case) -> list[Value]:
    """Propose it if the script checkpoints and memory is free."""
    evidence = case.evidence
    peak = evidence.memory.peak_bytes if evidence.memory is not None else None
    size = evidence.gpu.memory_bytes if evidence.gpu is not None else None
    if peak and size and peak > NEARLY_FULL * size:
        return []
    return [True] if any(word in case.source for word in WORDS) else []


def install(patches: Patches, _value: Value) -> None:
    """Replace the functions before a model imports them by name."""
    import torch.utils.checkpoint as checkpointing

    own = {"use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop"}

    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in own})

    def checkpoint_sequential(functions: Any, segments: int, input: Any, *_: Any, **__: Any) -> Any:  # noqa: A002
        for function in functions.children() if hasattr(functions, "children") else functions:
            input = function(input)  # noqa: A001
        return input

    patches.replace(checkpointing, "checkpoint", checkpoint)
    patches.replace(checkpointing, "checkpoint_sequential", checkpoint_sequential)


TREATMENT = Treatment(propose, install, "keep activations instead of computing them again", safety="exact")
