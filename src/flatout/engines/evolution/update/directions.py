"""The direction in which fitness grows, from the fitness of the members.

Member i ran W + s_i sigma E_v, where E_v = expand_v^T shrink_v / sqrt(rank) is the variant v that it shares
with its antithetic twin.  The estimate of the direction in which fitness grows is

    U = 1/N sum_i f_i s_i E_v(i) = 1/N sum_v c_v E_v,    c_v = f_2v - f_2v+1  (f_v without antithetic pairs)

and, because every E_v is a product of thin factors, U is one product of two tall matrices: no E_v is formed,
and the sum over a thousand members costs as much as a thousand rows of a forward.  Matrices of one shape are
moved together (see `population.weights`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from flatout.multiplex.noise.draws import FullNoise

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.engines.evolution.population.weights import Stack

# Variants per product: it bounds the fp32 copies of int8 factors.  A constant, so that sums run in the same
# order in every process.
BLOCK = 1024

Draw = Callable[[range], "Stack | FullNoise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """One update in figures."""

    direction_norm: float  # of U, before the optimizer
    update_norm: float  # of what the weights moved by
    update_share: float | None  # of the weights' norm; None where they are all zero
    cosine: float | None  # of U with the U of the epoch before; None: not asked for, or undefined
    reward_mean: float | None
    reward_std: float | None
    reward_max: float | None
    reward_failures: int  # rows whose reward is not a number


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """c_v of every variant, on the host and on the device; `gains` are at most 1, times `largest`.

    Rewards come from the host: the largest is known there, and nothing waits for the device.
    """

    host: Tensor
    device: Tensor  # float32
    gains: Tensor  # float16, as the kernel that moves a stack takes them
    largest: float

    @classmethod
    def of_fitness(cls, fitness: Tensor, *, antithetic: bool, device: torch.device) -> Coefficients:
        """Take the difference of antithetic members 2v and 2v + 1, which share a variant."""
        return cls.of(fitness[0::2] - fitness[1::2] if antithetic else fitness, device=device)

    @classmethod
    def of(cls, host: Tensor, *, device: torch.device) -> Coefficients:
        largest = float(host.abs().max()) or 1.0
        on_device = host.to(device, torch.float32)  # once: each copy would wait for the device
        return cls(host=host, device=on_device, gains=(on_device / largest).half(), largest=largest)


def direction(draw: Draw, coefficients: Tensor) -> Tensor:
    """Return sum_v c_v scale E_v in fp32 [matrices, out, in]; `draw` gives the noise of variants.

    Of a vector with full noise, sum_v c_v scale noise_v [1, width].
    """
    total: Tensor | None = None
    for block in blocks(len(coefficients)):
        noise = draw(block)
        gains = coefficients[block.start : block.stop]
        if isinstance(noise, FullNoise):
            part = ((gains * noise.scale) @ noise.values)[None]
            total = part if total is None else total.add_(part)
            continue
        # Terms of one variant lie next to each other once [variants, rank, width] is flattened.
        expand = (noise.expand * (gains * noise.scales[0])[:, None, None]).flatten(1, 2)
        shrink = noise.shrink.flatten(1, 2).float()
        with _tensor_cores(expand.device):
            total = torch.bmm(expand.mT, shrink) if total is None else total.baddbmm_(expand.mT, shrink)
    if total is None:
        raise ValueError("a direction needs at least one variant")
    return total


@contextlib.contextmanager
def _tensor_cores(device: torch.device) -> Iterator[None]:
    """Use TF32 on a GPU: int8 noise is exact in its 11 bits, a coefficient loses one part in 2,000.

    A full fp32 product would take six times as long, which at rank 4 is several percent of a generation.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def blocks(num_variants: int) -> Iterator[range]:
    """Yield all variants in order, at most `BLOCK` at once."""
    for start in range(0, num_variants, BLOCK):
        yield range(start, min(start + BLOCK, num_variants))


@dataclass(slots=True)
class UpdateTally:
    """Squares of norms of every stack, from which the statistics of an update follow.

    They are summed at the end: each addition on the device would cost the host a launch.
    """

    steps: list[Tensor] = field(default_factory=list)  # [3]: of the direction, the move, the moved masters
    compared: list[Tensor] = field(default_factory=list)  # [2]: of the direction before, and their product

    def compare(self, ascent: Tensor, previous: Tensor) -> None:
        """Record how a stack's direction relates to the previous one."""
        ascent, previous = ascent.float(), previous.float()
        overlap = torch.dot(ascent.flatten(), previous.flatten())
        self.compared.append(torch.stack((torch.linalg.vector_norm(previous).square(), overlap)))

    def statistics(self, rewards: Tensor) -> Statistics:
        """Compute the figures: the one place where the host waits for the device."""
        known = rewards[torch.isfinite(rewards)].double()
        direction, moved, weights = _sums(self.steps) or (0.0, 0.0, 0.0)
        previous, overlap = _sums(self.compared) or (0.0, 0.0)
        length = math.sqrt(direction * previous)
        return Statistics(
            direction_norm=math.sqrt(direction),
            update_norm=math.sqrt(moved),
            update_share=math.sqrt(moved / weights) if weights else None,
            cosine=overlap / length if length else None,
            reward_mean=float(known.mean()) if len(known) else None,
            reward_std=float(known.std(correction=0)) if len(known) else None,
            reward_max=float(known.max()) if len(known) else None,
            reward_failures=rewards.numel() - len(known),
        )


def _sums(rows: Sequence[Tensor]) -> list[float]:
    """Sum rows in float64; an empty list for no rows."""
    found: list[float] = torch.stack(list(rows)).double().sum(0).tolist() if rows else []
    return found
