"""The noise of a population: which parameters it touches, and the factors of any variants at any epoch.

Targets are weight matrices and get low-rank factors.  Everything else (`others`) is frozen, or gets a full
vector of noise per variant.  Noise is a function of a counter, so nothing has to be kept; what a forward runs
with is *resident* all the same, because it is read at every token and drawn once per epoch.  Resident factors
live in buffers that are refilled in place: a captured CUDA graph goes on reading the same addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from flatout.multiplex import noise
from flatout.multiplex.factors import Factors
from flatout.multiplex.noise import FullNoise

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.engines.evolution.integer import NoiseTable

NoiseKind = Literal["int8", "normal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What the noise of a run is drawn from."""

    seed: int
    rank: int
    sigma: float
    kind: NoiseKind


@dataclass(slots=True)
class Resident:
    """Factors in memory: those of `variants` at `epoch`."""

    factors: dict[str, Factors]
    capacity: int
    refill: noise.Refill
    variants: range = range(0)
    epoch: int | None = None


class Perturbations:
    """Draws factors for `targets` and full noise for `others`, both weights by name."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        targets: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        table: NoiseTable | None = None,
        scales: Mapping[str, float] | None = None,
    ) -> None:
        self.recipe = recipe
        self._targets = targets
        self._others = others
        self._table = table
        self._scales = scales or {}
        self._resident: Resident | None = None

    def factors(self, name: str, *, variants: range, epoch: int) -> Factors:
        """The factors of one target, from memory if they are there."""
        kept = self.in_memory(name, variants=variants, epoch=epoch)
        return kept or self._drawn(name, variants=variants, epoch=epoch)

    def in_memory(self, name: str, *, variants: range, epoch: int) -> Factors | None:
        """The factors of one target, if those of all `variants` are resident."""
        kept = self._resident
        if kept is None or kept.epoch != epoch or not _inside(variants, kept.variants):
            return None
        first, last = variants.start - kept.variants.start, variants.stop - kept.variants.start
        whole = kept.factors[name]
        return Factors(whole.shrink[first:last], whole.expand[first:last], whole.scale)

    def full(self, name: str, *, variants: range, epoch: int) -> FullNoise:
        """The noise of one of the others."""
        vector = self._others[name]
        return noise.draw_full(
            name,
            width=len(vector),
            seed=self.recipe.seed,
            epoch=epoch,
            pairs=variants,
            sigma=self.recipe.sigma,
            device=vector.device,
        )

    def resident(self, *, variants: range, epoch: int, capacity: int) -> dict[str, Factors]:
        """The factors of all targets in buffers of `capacity` variants, those of `variants` first."""
        kept = self._resident
        if kept is None or kept.capacity != capacity:
            made = self._buffers(capacity)
            refill = noise.Refill(made, seed=self.recipe.seed)
            self._resident = kept = Resident(factors=made, capacity=capacity, refill=refill)
        if (kept.variants, kept.epoch) != (variants, epoch):
            kept.epoch = None  # an interrupt below leaves them torn
            if self._table is None:
                kept.refill(epoch=epoch, pairs=variants)
            else:
                self._copy_from_table(kept.factors, variants=variants, epoch=epoch)
            kept.variants, kept.epoch = variants, epoch
        return kept.factors

    def release(self) -> None:
        """Give the buffers back."""
        self._resident = None

    def _buffers(self, capacity: int) -> dict[str, Factors]:
        found = {}
        for name in self._targets:
            one = self._drawn(name, variants=range(1), epoch=0)
            shrink, expand = (
                torch.zeros(capacity, *side.shape[1:], dtype=side.dtype, device=side.device)
                for side in (one.shrink, one.expand)
            )
            found[name] = Factors(shrink, expand, one.scale)
        return found

    def _copy_from_table(self, factors: Mapping[str, Factors], *, variants: range, epoch: int) -> None:
        for name, whole in factors.items():
            drawn = self._drawn(name, variants=variants, epoch=epoch)
            whole.shrink[: len(variants)].copy_(drawn.shrink)
            whole.expand[: len(variants)].copy_(drawn.expand)

    def _drawn(self, name: str, *, variants: range, epoch: int) -> Factors:
        weight, recipe = self._targets[name], self.recipe
        if self._table is not None:
            return self._table.factors(
                name,
                shape=weight.shape,
                epoch=epoch,
                variants=variants,
                rank=recipe.rank,
                scale=self._scales[name],
            )
        return noise.draw_factors(
            name,
            out_width=weight.shape[0],
            in_width=weight.shape[1],
            seed=recipe.seed,
            epoch=epoch,
            pairs=variants,
            rank=recipe.rank,
            sigma=recipe.sigma,
            device=weight.device,
            dtype=self._dtype(weight),
        )

    def _dtype(self, weight: Tensor) -> torch.dtype:
        if self.recipe.kind == "int8":
            return torch.int8
        return torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32


def _inside(inner: range, outer: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop
