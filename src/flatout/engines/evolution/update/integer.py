"""Evolution without floating point: int8 weights that move by one step when enough members vote for it.

A weight is an int8 number times a power of two, its matrix's own *step*.  Member i runs the integer W + (s_i
A_v B_v^T >> shift): factors are int8 numbers read from one table at offsets that the counter names, so noise
costs a lookup.  Fitness is the sign of a pair's difference, -1, 0 or 1, and the votes for a matrix are

    V = sum_v sign_v A_v B_v^T,    an integer

A weight whose vote passes the threshold moves by one step in the vote's direction.  Every quantity is an
exact integer, so an update is the same on every device and in every order.

The forward computes with step * W in the model's own float type, where both are exact: int8 times a power of
two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch

from flatout.engines.evolution.population.weights import Stack
from flatout.engines.evolution.update.masters import squares
from flatout.ground.errors import BadInput
from flatout.multiplex.noise.draws import UNIT, Side, normals
from flatout.multiplex.noise.philox import philox, stream_key

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.engines.evolution.population.weights import Names
    from flatout.engines.evolution.update.directions import Coefficients, Draw

TABLE = 1 << 20
LARGEST = 127
# A product of two int8 numbers is at most 2^14 - 2^8 + 1; so many of them add up exactly in fp32.
EXACT_TERMS = (1 << 24) // (LARGEST * LARGEST)
TABLE_OFFSETS = 2  # domain of the counter: never shared with noise or sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseTable:
    """Int8 noise as slices of one table; a counter says which, so any process finds the same ones."""

    seed: int
    values: Tensor

    @classmethod
    def drawn(cls, seed: int, *, device: torch.device) -> NoiseTable:
        """Draw the table of a seed."""
        rows = normals(
            seed=seed,
            epoch=0,
            parameter="table",
            side="full",
            pairs=range(1),
            count=TABLE,
            device=device,
            dtype=torch.int8,
        )
        return cls(seed=seed, values=rows[0])

    def fill(self, names: Names, stack: Stack, *, variants: range, epoch: int) -> None:
        """Write the noise of `variants` into the first factors of a stack of the matrices `names`."""
        device, num = self.values.device, len(variants)
        numbers = torch.arange(variants.start, variants.stop, dtype=torch.int64, device=device)
        counters = numbers.expand(len(names), num)
        fixed = [torch.full_like(counters, word) for word in (epoch, 0, TABLE_OFFSETS)]
        sides: dict[Side, Tensor] = {"shrink": stack.shrink, "expand": stack.expand}
        for side, out in sides.items():
            keys = [stream_key(self.seed, name, side) for name in names]
            key = torch.tensor(keys, dtype=torch.int64, device=device).T[:, :, None]
            offsets = philox((counters, fixed[0], fixed[1], fixed[2]), key=key.unbind())[0]
            steps = torch.arange(out.shape[2:].numel(), device=device)
            places = (offsets[:, :, None] + steps) % TABLE
            out[:, :num] = self.values[places].view(len(names), num, *out.shape[2:])


def vote(draw: Draw, signs: Tensor) -> Tensor:
    """Return sum_v sign_v A_v B_v^T of every matrix of a stack, exact, as int32 [matrices, out, in]."""
    first = draw(range(1))
    assert isinstance(first, Stack)
    block = max(1, EXACT_TERMS // first.shrink.shape[2])
    total: Tensor | None = None
    for start in range(0, len(signs), block):
        stack = draw(range(start, min(start + block, len(signs))))
        assert isinstance(stack, Stack)
        gains = signs[start : start + block].to(stack.expand.device, torch.float32)
        expand = (stack.expand * gains[:, None, None]).flatten(1, 2)
        part = torch.bmm(expand.mT, stack.shrink.flatten(1, 2).float()).to(torch.int32)
        total = part if total is None else total.add_(part)
    if total is None:
        raise ValueError("a vote needs at least one variant")
    return total


def threshold_of(share: float, *, num_variants: int, rank: int) -> int:
    """Return the vote that a share of the weights passes by chance: votes are then normal noise."""
    if not 0 < share < 1:
        raise BadInput(f"lr={share} is not a share of the int8 weights", hint="give 0 to 1, such as 0.01")
    deviation = math.sqrt(num_variants * rank) / UNIT**2
    return math.ceil(NormalDist().inv_cdf(1 - share / 2) * deviation)


class IntegerMasters:
    """Int8 weights by name, kept in `stacks`; making them quantises the model's weights."""

    def __init__(self, weights: Mapping[str, Tensor], *, stacks: Sequence[Names], threshold: int) -> None:
        self.threshold = threshold
        self._weights = {name: weight.detach() for name, weight in weights.items()}
        self.steps = {name: step_of(weight) for name, weight in self._weights.items()}
        self._stacks = {
            names: torch.stack([_quantised(self._weights[name], self.steps[name]) for name in names])
            for names in stacks
        }
        self._integers = {
            name: stack[number] for names, stack in self._stacks.items() for number, name in enumerate(names)
        }
        for names in self._stacks:
            self._write(names)

    def __getitem__(self, name: str) -> Tensor:
        return self._integers[name]

    def scale(self, name: str, *, sigma: float, rank: int) -> float:
        """Return the power of two that gives a sum of `rank` table products the deviation `sigma`."""
        shift = round(math.log2(self.steps[name] * math.sqrt(rank) / (sigma * UNIT**2)))
        return self.steps[name] * 2.0**-shift

    def direction(self, draw: Draw, coefficients: Coefficients) -> Tensor:
        """Return the votes of the pairs."""
        return vote(draw, coefficients.device.sign())

    def step_at_once(self, names: Names, draw: Draw, coefficients: Coefficients) -> None:
        """Return None: there is no kernel for votes."""

    def step(self, names: Names, votes: Tensor) -> Tensor:
        """Move every weight of a stack whose vote passes the threshold by one.

        The squares of the norms of the votes, of the move and of the moved weights, [3].
        """
        integers = self._stacks[names]
        moves = (votes > self.threshold).to(torch.int8) - (votes < -self.threshold).to(torch.int8)
        moved = (integers.to(torch.int16) + moves).clamp(-LARGEST, LARGEST).to(torch.int8)
        moves = moved - integers
        integers.copy_(moved)
        written = self._write(names)
        moved_by = moves * self._steps_of(names)
        return torch.stack([squares(each) for each in (votes.float(), moved_by, written)])

    def tensors(self) -> dict[str, Tensor]:
        """Return everything a resumed run needs, by flat names."""
        steps = {f"step/{name}": torch.tensor(step, dtype=torch.float64) for name, step in self.steps.items()}
        return {**{f"integers/{name}": value for name, value in self._integers.items()}, **steps}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` returned in another process."""
        for name, integers in self._integers.items():
            saved = tensors.get(f"integers/{name}")
            if saved is None or saved.shape != integers.shape:
                raise BadInput(
                    f"the checkpoint has no int8 weights {tuple(integers.shape)} for {name}",
                    hint="resume with the model, the targets and the arithmetic of the run",
                )
            integers.copy_(saved)
            self.steps[name] = float(tensors[f"step/{name}"])
        for names in self._stacks:
            self._write(names)

    def _write(self, names: Names) -> Tensor:
        """Write the weights of a stack into the model; return them in fp32, where products are exact."""
        values = self._stacks[names] * self._steps_of(names)
        torch._foreach_copy_([self._weights[name] for name in names], list(values.unbind()))
        return values

    def _steps_of(self, names: Names) -> Tensor:
        steps = torch.tensor([self.steps[name] for name in names], dtype=torch.float32)
        return steps.to(self._stacks[names].device)[:, None, None]


def _quantised(weight: Tensor, step: float) -> Tensor:
    return (weight.float() / step).round().clamp(-LARGEST, LARGEST).to(torch.int8)


def step_of(weight: Tensor) -> float:
    """Return the smallest power of two that is at least the largest weight over 127."""
    largest = float(weight.detach().abs().max())
    return 2.0 ** math.ceil(math.log2(largest / LARGEST)) if largest else 2.0**-7
