"""Matrices of one shape, moved together.

An update does a dozen operations to each matrix of a model.  A GPU takes a few microseconds for those of a
small matrix and the host ten times as long to ask for them, so a model of two hundred matrices would wait for
the host.  A layer's matrices have the shapes of every other layer's: their factors lie in one tensor, and one
batched product and one kernel move them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.multiplex.factors import Factors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Names = tuple[str, ...]

# Numbers of a stack's product and of the factors it reads: 256 MiB beside the model on a GPU, and on a CPU
# what its caches hold.  A matrix that is larger is a stack of its own.
DEVICE_NUMBERS = 1 << 26
CPU_NUMBERS = 1 << 18


@dataclass(frozen=True, slots=True)
class Stack:
    """Factors of matrices of one shape: `shrink` [matrices, variants, rank, in], `expand` [..., out]."""

    shrink: Tensor
    expand: Tensor
    scales: tuple[float, ...]

    def __getitem__(self, number: int) -> Factors:
        return Factors(self.shrink[number], self.expand[number], self.scales[number])

    def part(self, variants: range) -> Stack:
        """The factors of some variants, without a copy."""
        first, last = variants.start, variants.stop
        return Stack(self.shrink[:, first:last], self.expand[:, first:last], self.scales)


def stacks_of(weights: Mapping[str, Tensor], *, terms: int) -> tuple[Names, ...]:
    """The names of matrices in stacks; a product of theirs sums `terms` terms: variants times rank."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[str]] = {}
    for name, weight in weights.items():
        alike.setdefault((weight.shape, weight.dtype, weight.device), []).append(name)
    found: list[Names] = []
    for (shape, _, device), names in alike.items():
        numbers = shape.numel() + terms * sum(shape)
        size = max(1, (CPU_NUMBERS if device.type == "cpu" else DEVICE_NUMBERS) // numbers)
        found += [tuple(names[start : start + size]) for start in range(0, len(names), size)]
    return tuple(found)
