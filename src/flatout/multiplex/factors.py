"""Low-rank variants of one linear map, and the plain arithmetic that defines them.

Variant v of a weight W [out, in] is W + scale * sum_j expand[v, j] shrink[v, j]^T.  A row x of sign s runs

    y = x W^T + b + s * scale * sum_j (x . shrink[v, j]) expand[v, j]

so W is shared by every row and no variant of it is ever formed.  `shrink` and `expand` are LoRA's A and B,
and EGGROLL's B and A: named here by what they do.  They may be float, or int8 with the unit in `scale`:
integers are exact in bfloat16 up to 256, so int8 noise loses nothing in a product and halves the bytes that a
step reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Factors:
    """`shrink` [variants, rank, in] and `expand` [variants, rank, out] of one linear map."""

    shrink: Tensor
    expand: Tensor
    scale: float

    def __post_init__(self) -> None:
        """Raise BadInput unless both factors have the same variants and ranks."""
        if self.shrink.ndim != 3 or self.expand.ndim != 3 or self.shrink.shape[:2] != self.expand.shape[:2]:
            raise BadInput(
                f"shrink {tuple(self.shrink.shape)} and expand {tuple(self.expand.shape)} do not match",
                hint="both are [variants, rank, width]",
            )

    @property
    def num_variants(self) -> int:
        """How many variants the factors hold."""
        return self.shrink.shape[0]

    @property
    def rank(self) -> int:
        """Terms per variant."""
        return self.shrink.shape[1]

    def delta(self, variant: int, *, sign: int = 1) -> Tensor:
        """Materialise the weight change of one variant, in float32 [out, in]."""
        expand, shrink = self.expand[variant].float(), self.shrink[variant].float()
        return (expand.T @ shrink) * (sign * self.scale)
