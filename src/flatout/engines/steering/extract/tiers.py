"""Blocks of activations in the fastest memory that has room for them.

A tier is a place with a budget of bytes: the GPU that computes, perhaps a second GPU, page-locked host
memory.  Below the last tier is the disk, which has every block, memory-mapped.  A block that is used moves to
the first tier; what it displaces there, the block unused for longest, moves one tier down, and from the last
one it is dropped: the disk still has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.ground.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """A place for blocks and the bytes it may take there: "cuda:0", "cuda:1", "cpu"."""

    device: str
    budget_bytes: int

    def __post_init__(self) -> None:
        if self.budget_bytes < 0:
            raise BadInput(f"the budget of tier {self.device} is {self.budget_bytes} bytes, below 0")
        kind = torch.device(self.device).type
        if kind == "cuda" and not torch.cuda.is_available():
            raise BadInput(f"tier {self.device}: torch sees no GPU", hint='use Tier(device="cpu", ...)')

    def hold(self, block: Tensor) -> Tensor:
        """Copy a block into this tier; on the host page-locked where there is a GPU to copy to."""
        if torch.device(self.device).type != "cpu":
            return block.to(self.device, non_blocking=True)
        # A copy even from the host: what the disk tier gives is a view of a mapped file.
        held = torch.empty(block.shape, dtype=block.dtype, pin_memory=torch.cuda.is_available())
        return held.copy_(block)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldTier(Tier):
    """A tier, and the bytes of the blocks that it holds."""

    held_bytes: int


class Tiers:
    """Blocks by their key, over several tiers, fastest first."""

    def __init__(self, tiers: Sequence[Tier] = ()) -> None:
        self.tiers = tuple(tiers)
        self._held: tuple[OrderedDict[Hashable, Tensor], ...] = tuple(OrderedDict() for _ in self.tiers)

    def fetch(self, key: Hashable, load: Callable[[], Tensor]) -> Tensor:
        """Return the block `key`; `load` maps it from the disk if no tier holds it."""
        level = self.level_of(key)
        if level == 0:
            self._held[0].move_to_end(key)
            return self._held[0][key]
        block = load() if level is None else self._held[level].pop(key)
        return self._place(key, block, level=0)

    def drop(self, key: Hashable) -> None:
        """Forget a block."""
        for held in self._held:
            held.pop(key, None)

    def held_bytes(self) -> tuple[int, ...]:
        """Count the bytes in each tier."""
        return tuple(sum(block.nbytes for block in held.values()) for held in self._held)

    def held(self) -> tuple[HeldTier, ...]:
        """Return the tiers with what they hold."""
        return tuple(
            HeldTier(device=tier.device, budget_bytes=tier.budget_bytes, held_bytes=num_bytes)
            for tier, num_bytes in zip(self.tiers, self.held_bytes(), strict=True)
        )

    def level_of(self, key: Hashable) -> int | None:
        """Return the tier that holds a block; None if only the disk does."""
        return next((level for level, held in enumerate(self._held) if key in held), None)

    def _place(self, key: Hashable, block: Tensor, *, level: int) -> Tensor:
        """Put a block into the first tier from `level` on that can hold it, making room there."""
        fitting = (i for i in range(level, len(self.tiers)) if block.nbytes <= self.tiers[i].budget_bytes)
        place = next(fitting, None)
        if place is None:
            return block
        tier, held = self.tiers[place], self._held[place]
        used = sum(other.nbytes for other in held.values())
        while held and used + block.nbytes > tier.budget_bytes:
            oldest, displaced = held.popitem(last=False)
            used -= displaced.nbytes
            self._place(oldest, displaced, level=place + 1)
        held[key] = tier.hold(block)
        return held[key]
