"""The gradients of one update, summed over its batches in their order, whichever process ran them.

Sums round, so their order decides the last bits, and a product that adds to a gradient in place may round
differently from one that begins at zero.  So each batch begins at zero, its gradients are set aside, and they
are added one after the other: in one process, or by each process for its share of the numbers (`total`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flatout.engines.run.ranks import fold

Total = Callable[[Tensor], Tensor]  # [batches of this process, N] to the sum over all processes [N]


class GradientSum:
    """Collects the gradients of every batch of an update, and after the last one writes their sum."""

    def __init__(self, total: Total = fold) -> None:
        self._total = total
        self._parts: list[Tensor] = []
        self._spare: list[Tensor] = []  # parts of the last update, on a CPU, where fresh memory is slow

    @classmethod
    def where_needed(
        cls, *, accumulation: int, device: torch.device, total: Total | None
    ) -> GradientSum | None:
        """Return None where gradients may add up in place: with one batch, or on a single GPU, for speed."""
        if total is not None:
            return cls(total)
        return cls() if accumulation > 1 and device.type == "cpu" else None

    def add(self, gradients: list[Tensor], *, last: bool) -> None:
        """Set aside the gradients of one batch and zero them; after the last batch, write the whole sum."""
        spare = self._spare.pop() if self._spare else None
        if spare is not None and len(spare) != sum(each.numel() for each in gradients):
            spare = None  # a task has ended: fewer weights train
        self._parts.append(torch.cat([each.reshape(-1) for each in gradients], out=spare))
        if not last:
            torch._foreach_zero_(gradients)
            return
        one_part = len(self._parts) == 1
        whole = self._total(self._parts[0][None] if one_part else torch.stack(self._parts))
        if self._parts[0].device.type == "cpu":
            self._spare = self._parts
        self._parts = []
        parts = whole.split([each.numel() for each in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
