"""Steps that keep their activations where the script recomputes them in the backward pass.

While a checkpointed part of the model is recomputed, all of its activations are in memory, and they fit: the
peak, once more for each such part, bounds what keeping all of them takes.  If that bound does not fit, the
job may need its checkpoints, and the arm is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flatout.measure.arms.arm import COMPILED, Arm, ArmContext
from flatout.measure.evidence import Place
from flatout.measure.lines.counted_calls import checkpoint_generator
from flatout.measure.patches import Patches
from flatout.measure.phases import has_compiled

ROOM = 0.8  # of the memory
RECOMPUTED = 0.3  # of the step, about: one forward of three passes
NEEDED = "memory may need the checkpoints"


class NoCheckpointing(Arm):
    """Calls checkpointed functions directly."""

    kind = label = "no-checkpointing"

    def __init__(self, *, suspicion: float, place: Place | None) -> None:
        self.suspicion, self.place = suspicion, place
        self._patches = Patches()

    def begin(self) -> None:
        import torch.utils.checkpoint as checkpointing

        class Called:
            """Replaces the function that recomputes its input."""

            @staticmethod
            def apply(function: Any, _preserve: bool, *args: Any) -> Any:
                return function(*args)

        def hold(*_args: Any, **_kwargs: Any) -> Iterator[None]:
            yield

        self._patches.replace(checkpointing, "CheckpointFunction", Called)
        self._patches.replace(checkpointing, checkpoint_generator(), hold)

    def end(self) -> None:
        self._patches.undo()

    release = end


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose the arm if parts of the model are checkpointed; refuse it if all activations might not fit."""
    sites = [site for site in context.sites if site.kind == "call" and site.op == "checkpoint"]
    if not sites or context.memory is None:
        return
    most = max(sites, key=lambda site: site.calls_per_step)
    arm = NoCheckpointing(suspicion=RECOMPUTED, place=most.place)
    num_parts = sum(site.calls_per_step for site in sites)
    peak = context.memory.peak_bytes
    if has_compiled():
        arm.refusal = COMPILED
    elif peak is None:
        arm.refusal = "peak memory was not measured"
    elif peak * (1 + num_parts) > ROOM * memory_bytes(context.device):
        arm.refusal = NEEDED
    yield arm


def memory_bytes(device: str) -> int:
    """Return the memory that the job may use."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[1])
    from flatout.hardware.host import read_host

    return read_host().memory_bytes or 0
