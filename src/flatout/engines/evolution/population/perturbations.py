"""The noise of a population: which parameters it changes, and the factors of any variants at any epoch.

Targets are weight matrices and get low-rank factors.  Everything else (`others`) is frozen, or gets a full
vector of noise per variant.  Noise is a function of a counter, so it need not be stored; but a forward reads
it at every token, so its factors stay *resident* in memory and are drawn once per epoch.  They lie in buffers
that are refilled in place, so that a captured CUDA graph keeps its addresses.  Factors of matrices of one
shape are one tensor (see `weights`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from flatout.engines.evolution.population.weights import Names, Stack
from flatout.multiplex.noise import draws
from flatout.multiplex.noise.draws import FullNoise

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.engines.evolution.update.integer import NoiseTable
    from flatout.multiplex.factors import Factors

NoiseKind = Literal["int8", "normal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseSource:
    """What the noise of a run is drawn from."""

    seed: int
    rank: int
    sigma: float
    kind: NoiseKind


@dataclass(slots=True)
class Resident:
    """Factors in memory: those of `variants` at `epoch`."""

    stacks: dict[Names, Stack]
    factors: dict[str, Factors]  # the same by target
    capacity: int
    refill: draws.Refill
    variants: range = range(0)
    epoch: int | None = None


class Perturbations:
    """Draws factors for `targets`, in `stacks`, and full noise for `others`: weights by name."""

    def __init__(
        self,
        source: NoiseSource,
        *,
        targets: Mapping[str, Tensor],
        stacks: Sequence[Names],
        others: Mapping[str, Tensor],
        table: NoiseTable | None = None,
        scales: Mapping[str, float] | None = None,
    ) -> None:
        self.source = source
        self._targets = targets
        self._stacks = stacks
        self._others = others
        self._table = table
        self._scales = scales or {}
        self._resident: Resident | None = None

    def factors(self, name: str, *, variants: range, epoch: int) -> Factors:
        """Return the factors of one target."""
        return self._drawn((name,), variants=variants, epoch=epoch)[0]

    def draw(self, names: Names, variants: range, *, epoch: int) -> Stack | FullNoise:
        """Draw the noise of a stack, or of one of the others, which is a stack by itself."""
        if names[0] in self._others:
            return self.full(names[0], variants=variants, epoch=epoch)
        return self.stack(names, variants=variants, epoch=epoch)

    def stack(self, names: Names, *, variants: range, epoch: int) -> Stack:
        """Return the factors of a stack, from memory if they are there."""
        kept = self._resident
        if kept is None or kept.epoch != epoch or not _inside(variants, kept.variants):
            return self._drawn(names, variants=variants, epoch=epoch)
        first = variants.start - kept.variants.start
        return kept.stacks[names].part(range(first, first + len(variants)))

    def full(self, name: str, *, variants: range, epoch: int) -> FullNoise:
        """Draw the noise of one of the others."""
        vector = self._others[name]
        return draws.draw_full(
            name,
            width=len(vector),
            seed=self.source.seed,
            epoch=epoch,
            pairs=variants,
            sigma=self.source.sigma,
            device=vector.device,
        )

    def resident(self, *, variants: range, epoch: int, capacity: int) -> dict[str, Factors]:
        """Return the factors of all targets in buffers of `capacity` variants, `variants` first."""
        kept = self._resident
        if kept is None or kept.capacity != capacity:
            self._resident = None  # free it before allocating another
            self._resident = kept = self._buffers(capacity)
        if (kept.variants, kept.epoch) != (variants, epoch):
            kept.epoch = None  # an interrupt below leaves them half filled
            if self._table is None:
                kept.refill(epoch=epoch, pairs=variants)
            else:
                for names, stack in kept.stacks.items():
                    self._table.fill(names, stack, variants=variants, epoch=epoch)
            kept.variants, kept.epoch = variants, epoch
        return kept.factors

    def release(self) -> None:
        """Give the buffers back."""
        self._resident = None

    def _buffers(self, capacity: int) -> Resident:
        stacks = {names: self._empty(names, capacity=capacity) for names in self._stacks}
        factors = {
            name: stack[number] for names, stack in stacks.items() for number, name in enumerate(names)
        }
        refill = draws.Refill(factors, seed=self.source.seed)
        return Resident(stacks=stacks, factors=factors, capacity=capacity, refill=refill)

    def _drawn(self, names: Names, *, variants: range, epoch: int) -> Stack:
        stack = self._empty(names, capacity=len(variants))
        if self._table is not None:
            self._table.fill(names, stack, variants=variants, epoch=epoch)
            return stack
        factors = {name: stack[number] for number, name in enumerate(names)}
        draws.Refill(factors, seed=self.source.seed)(epoch=epoch, pairs=variants)
        return stack

    def _empty(self, names: Names, *, capacity: int) -> Stack:
        weight, rank = self._targets[names[0]], self.source.rank
        dtype = self._dtype(weight)
        expand, shrink = (
            torch.zeros(len(names), capacity, rank, width, dtype=dtype, device=weight.device)
            for width in weight.shape
        )
        scale = self.source.sigma / math.sqrt(rank) * draws.unit(dtype) ** 2
        return Stack(shrink, expand, tuple(self._scales.get(name, scale) for name in names))

    def _dtype(self, weight: Tensor) -> torch.dtype:
        if self.source.kind == "int8":
            return torch.int8
        return torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32


def _inside(inner: range, outer: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop
