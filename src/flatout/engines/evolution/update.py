"""From the fitness of members to a step of the weights.

Member i ran W + s_i sigma E_v, where E_v = expand_v^T shrink_v / sqrt(rank) is the variant v that it shares
with its antithetic twin.  The estimate of the direction in which fitness grows is

    U = 1/N sum_i f_i s_i E_v(i) = 1/N sum_v c_v E_v,    c_v = f_2v - f_2v+1  (f_v without antithetic pairs)

and, because every E_v is a product of thin factors, U is one product of two tall matrices: no E_v is formed,
and the sum over a thousand members costs as much as a thousand rows of a forward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.engines.evolution.masters import Change
    from flatout.multiplex.factors import Factors
    from flatout.multiplex.noise import FullNoise

# Variants per product: it bounds the fp32 copies of int8 factors.  A constant, so that sums run in the same
# order in every process.
BLOCK = 1024

Draw = Callable[[range], "Factors"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """One update in figures."""

    direction_norm: float  # of U, before the optimizer
    update_norm: float  # of what the weights moved by
    update_share: float | None  # of the weights' norm; None where they are all zero
    cosine: (
        float | None
    )  # of U with the U of the epoch before; None where it was not asked for or is undefined
    reward_mean: float | None
    reward_std: float | None
    reward_max: float | None
    reward_failures: int  # rows whose reward is not a number


def per_variant(fitness: Tensor, *, antithetic: bool) -> Tensor:
    """c_v of every variant from f_i of every member."""
    return fitness[0::2] - fitness[1::2] if antithetic else fitness


def direction(draw: Draw, coefficients: Tensor) -> Tensor:
    """sum_v c_v scale E_v in fp32 [out, in]; `draw` gives the factors of a range of variants."""
    total: Tensor | None = None
    scale = 0.0
    for block in blocks(len(coefficients)):
        factors = draw(block)
        scale = factors.scale
        # Terms of one variant lie next to each other once [variants, rank, width] is flattened.
        gains = coefficients[block.start : block.stop].to(factors.expand.device, torch.float32) * scale
        expand = factors.expand.flatten(0, 1).float() * gains.repeat_interleave(factors.rank)[:, None]
        shrink = factors.shrink.flatten(0, 1).float()
        with _tensor_cores(expand.device):
            total = expand.T @ shrink if total is None else total.addmm_(expand.T, shrink)
    if total is None:
        raise ValueError("a direction of no variants")
    return total


@contextlib.contextmanager
def _tensor_cores(device: torch.device) -> Iterator[None]:
    """TF32 on a GPU: int8 noise is exact in its 11 bits, and a coefficient loses one part in 2,000.

    A full fp32 product would take six times as long, which at rank 4 is several percent of a generation.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def full_direction(draw: Callable[[range], FullNoise], coefficients: Tensor) -> Tensor:
    """sum_v c_v scale noise_v in fp32 for a vector with full noise."""
    total: Tensor | None = None
    scale = 0.0
    for block in blocks(len(coefficients)):
        noise = draw(block)
        scale = noise.scale
        part = coefficients[block.start : block.stop].to(noise.values.device, torch.float32) @ noise.values
        total = part if total is None else total.add_(part)
    if total is None:
        raise ValueError("a direction of no variants")
    return total.mul_(scale)


def blocks(num_variants: int) -> Iterator[range]:
    """All variants in order, at most `BLOCK` at once."""
    for start in range(0, num_variants, BLOCK):
        yield range(start, min(start + BLOCK, num_variants))


@dataclass(frozen=True, kw_only=True, slots=True)
class AtOnce:
    """Coefficients as the kernel that moves a matrix takes them: `gains` at most 1, times `unit`."""

    gains: Tensor
    unit: float

    @classmethod
    def of(cls, coefficients: Tensor, *, divisor: float, device: torch.device) -> AtOnce:
        """Rewards come from the host: their largest is known there, and nothing waits for the device."""
        largest = float(coefficients.abs().max()) or 1.0
        return cls(gains=(coefficients / largest).to(device, torch.float32), unit=largest / divisor)


@dataclass(slots=True)
class Tally:
    """Sums over the matrices of one update, from which its statistics follow."""

    direction: float | Tensor = 0.0
    moved: float | Tensor = 0.0
    weights: float | Tensor = 0.0
    previous: float | Tensor = 0.0
    overlap: float | Tensor = 0.0

    def add_direction(self, ascent: Tensor, *, previous: Tensor | None) -> None:
        self.direction = self.direction + torch.linalg.vector_norm(ascent).square()
        if previous is not None:
            self.previous = self.previous + torch.linalg.vector_norm(previous).square()
            self.overlap = self.overlap + torch.dot(ascent.flatten(), previous.flatten())

    def add_square(self, square: Tensor) -> None:
        """Of a direction that was never formed."""
        self.direction = self.direction + square

    def add_change(self, change: Change) -> None:
        self.moved = self.moved + change.moved
        self.weights = self.weights + change.weights

    def statistics(self, rewards: Tensor) -> Statistics:
        """The figures; the one place where the host waits for the device."""
        known = rewards[torch.isfinite(rewards)].double()
        moved, weights = float(self.moved), float(self.weights)
        length = math.sqrt(float(self.direction) * float(self.previous))
        return Statistics(
            direction_norm=math.sqrt(float(self.direction)),
            update_norm=math.sqrt(moved),
            update_share=math.sqrt(moved / weights) if weights else None,
            cosine=float(self.overlap) / length if length else None,
            reward_mean=float(known.mean()) if len(known) else None,
            reward_std=float(known.std(correction=0)) if len(known) else None,
            reward_max=float(known.max()) if len(known) else None,
            reward_failures=rewards.numel() - len(known),
        )
