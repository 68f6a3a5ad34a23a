"""What FSDP2 shards: the parameters of a model, in units.

`fully_shard` is called on each block and then on the model, so that each block is a unit, gathered and freed
as a whole, and what is left (embeddings, head) is the root's.  A block is taken to be what has a number in
its name: `encoder.layer.3`.  Each parameter is cut along its first dimension into as many chunks as there are
ranks; every rank holds as much as the largest chunk, which is the first rank's.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.ground.errors import BadInput
from flatout.memory.jobs.job import Job, Recipe

if TYPE_CHECKING:
    from torch import nn

ROOT = ""
_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParameter:
    """One parameter."""

    shape: tuple[int, ...]
    element_bytes: int
    trainable: bool = True

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.element_bytes

    def shard_elements(self, ranks: int) -> int:
        """Return the elements of the largest chunk; a scalar cannot be cut."""
        if not self.shape:
            raise BadInput("FSDP2 shards no parameter without dimensions", hint="give it the shape (1,)")
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])

    def shard_bytes(self, ranks: int) -> int:
        return self.shard_elements(ranks) * self.element_bytes

    def gathered_bytes(self, ranks: int) -> int:
        """Return the bytes of the whole parameter, with its padding."""
        return self.shard_bytes(ranks) * ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardUnit:
    """What is gathered and freed together; the root has the empty name."""

    name: str
    pieces: tuple[ShardedParameter, ...]

    @property
    def trainable(self) -> tuple[ShardedParameter, ...]:
        return tuple(piece for piece in self.pieces if piece.trainable)

    def shard_bytes(self, ranks: int) -> int:
        return sum(piece.shard_bytes(ranks) for piece in self.pieces)

    def gathered_bytes(self, ranks: int) -> int:
        return sum(piece.gathered_bytes(ranks) for piece in self.pieces)

    def holds(self, module: str | None) -> bool:
        """Return whether a module of this dotted name is the block or lies in it."""
        return self.name != ROOT and (module == self.name or (module or "").startswith(f"{self.name}."))


def block_of_name(name: str) -> str:
    """Return the block of a dotted name: up to its first number, else the root."""
    found = _BLOCK.match(name)
    return found.group() if found else ROOT


def units_of(model: nn.Module) -> tuple[ShardUnit, ...]:
    """Return a unit for each block, in the order of parameters, and the root's; shared parameters once."""
    pieces: dict[str, list[ShardedParameter]] = {ROOT: []}
    for name, parameter in model.named_parameters():
        piece = ShardedParameter(
            shape=tuple(parameter.shape),
            element_bytes=parameter.element_size(),
            trainable=parameter.requires_grad,
        )
        pieces.setdefault(block_of_name(name.rpartition(".")[0]), []).append(piece)
    return tuple(ShardUnit(name=name, pieces=tuple(found)) for name, found in pieces.items())


def units_of_job(job: Job, recipe: Recipe) -> tuple[ShardUnit, ...]:
    """Return the units of a job's model, which is made on the meta device: shapes without memory."""
    import torch

    with torch.device("meta"):
        model = job.make_model()
    if recipe.precision == "pure-bf16":
        model.to(torch.bfloat16)
    return units_of(model)
