"""What the planner asks of the memory room: how much a step needs, and how large a batch may be.

The planner reads configs and does arithmetic on batches; it never traces a model.  Everything it knows of
memory comes through `Forecast`, so that the same plan is made from a trace on a laptop, from a trace
corrected by a probe, or in a test from a straight line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from flatout.memory.jobs.job import Recipe

# The second micro-batch meets the gradients of the first; a third meets nothing that the second did not.
TRACED_ACCUMULATION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most a step holds: by tensors, by PyTorch's allocator, and by the whole process on the device."""

    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int  # reserved, and the CUDA context: what has to fit beside everybody else


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """`tight` is the largest that trains within a capacity, though the allocator may have to hand memory back
    and ask again; up to `safe` it never holds more than the capacity.  None: not even 1.
    """

    safe: int | None
    tight: int | None


class Forecast(Protocol):
    """The memory side of a plan, for one job on one device."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The names the job's batch maker understands, with the job's own values."""
        ...

    def peak_bytes(self, sizes: Mapping[str, int], *, recipe: Recipe) -> Peak:
        """What one step needs at these sizes, `batch_size` among them."""
        ...

    def trains(self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int) -> bool:
        """Whether the steps run on a device where the process gets no more than `capacity_bytes`."""
        ...

    def largest_batch(self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int) -> LargestBatch:
        """The largest batches for which `trains` holds, and for which the process never holds more."""
        ...

    @property
    def doubts(self) -> tuple[str, ...]:
        """What of the answers so far is a guess that may be too low, each as a clause."""
        ...

    def step_s(self, sizes: Mapping[str, int], *, recipe: Recipe) -> float | None:
        """Measured seconds of one micro-batch, forward and backward; None where nothing was measured."""
        ...

    def of_stage(self, name: str) -> Forecast:
        """The forecast of one stage: a stage may train another model."""
        ...


def traced(recipe: Recipe) -> Recipe:
    """The recipe with no more accumulation than memory can tell apart."""
    return dataclasses.replace(recipe, accumulation=min(recipe.accumulation, TRACED_ACCUMULATION))
