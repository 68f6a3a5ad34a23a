"""Which variant of a model each row of a batch runs, and each token of a packed one.

A *variant* is a small change on shared weights: low-rank factors, or a vector at a layer.  Row i of a batch
belongs to variant `variants[i]`, or to none: an unperturbed row is `None` and computes exactly what the plain
model computes.  A row may take its variant with the opposite sign: the two members of an antithetic pair
share one set of factors and differ only in the sign.  A sign is 1 or -1, or a multiple of it for noise that
is stronger or weaker than its factors.

Neighbouring rows of one variant are a `VariantRange`.  A batch of a few long texts packed end to end (the
adapters' training) is given as ranges of its tokens from the start; `Rows.ranges` gives those of rows.  The
products of `products.ranges` take either.

Kernels that take rows in any order read two small tensors, `index` (a valid variant for every row) and `sign`
(as given, or 0 for an unperturbed row).  They are buffers: a slot that is refilled by another variant writes
into them, and a captured CUDA graph sees the change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantRange:
    """Rows, or tokens of a packed batch, [start, stop) that run one variant."""

    variant: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def are_even(ranges: Sequence[VariantRange]) -> bool:
    """Return whether ranges are of one length and end to end, their variants neighbours in order."""
    if not ranges:
        return False
    first, size = ranges[0], len(ranges[0])
    return all(
        len(one) == size and one.variant == first.variant + place and one.start == first.start + place * size
        for place, one in enumerate(ranges)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Rows that lie in order: variant v owns rows [v * size, (v + 1) * size), the last half with sign -1.

    A kernel can then view the batch as [variants, size, ...] and needs no gather.
    """

    num: int
    size: int
    antithetic: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """Row i runs variant `variants[i]` times `signs[i]`; None runs the plain model."""

    variants: tuple[int | None, ...]
    signs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check every entry, and name the first that is wrong."""
        for row, variant in enumerate(self.variants):
            if variant is not None and variant < 0:
                raise BadInput(f"row {row} has variant {variant}", hint="an unperturbed row is None")
        if self.signs is None:
            return
        if len(self.signs) != len(self.variants):
            raise BadInput(f"{len(self.signs)} signs for {len(self.variants)} rows", hint="one sign per row")
        for row, sign in enumerate(self.signs):
            if not sign or not math.isfinite(sign):
                raise BadInput(f"row {row} has sign {sign}", hint="a sign is 1 or -1, or a multiple of it")

    @classmethod
    def plain(cls, num_rows: int) -> Rows:
        """Make rows that all run the plain model."""
        return cls((None,) * num_rows)

    @classmethod
    def grouped(cls, num_variants: int, *, size: int, antithetic: bool = False) -> Rows:
        """Make `size` rows for each variant, in order; if antithetic, the second half has sign -1."""
        if antithetic and size % 2:
            raise BadInput(
                f"{size} rows cannot be halved into an antithetic pair", hint="give an even number"
            )
        variants = tuple(variant for variant in range(num_variants) for _ in range(size))
        if not antithetic:
            return cls(variants)
        half = (1,) * (size // 2) + (-1,) * (size // 2)
        return cls(variants, half * num_variants)

    def __len__(self) -> int:
        return len(self.variants)

    @property
    def num_variants(self) -> int:
        """One more than the largest variant: how many sets of factors these rows may read."""
        return max((variant + 1 for variant in self.variants if variant is not None), default=0)

    @property
    def ranges(self) -> tuple[VariantRange, ...]:
        """Neighbouring rows of one variant, whatever their signs; rows of the plain model are in none."""
        found, start = [], 0
        for variant, rows in groupby(self.variants):
            stop = start + len(list(rows))
            if variant is not None:
                found.append(VariantRange(variant=variant, start=start, stop=stop))
            start = stop
        return tuple(found)

    @property
    def groups(self) -> Groups | None:
        """The grouped layout, if these rows have it."""
        ranges = self.ranges
        if not are_even(ranges) or ranges[0].variant or sum(map(len, ranges)) != len(self):
            return None
        num, size = len(ranges), len(ranges[0])
        if self.signs is None or all(sign > 0 for sign in self.signs):
            return Groups(num=num, size=size, antithetic=False)
        half = (True,) * (size // 2) + (False,) * (size // 2)
        is_positive = tuple(sign > 0 for sign in self.signs)
        return Groups(num=num, size=size, antithetic=True) if is_positive == half * num else None

    def tables(self, device: torch.device | str = "cpu") -> RowTables:
        """Make the tensors that kernels read, on `device`."""
        import torch

        signs = self.signs or (1,) * len(self)
        index = [0 if variant is None else variant for variant in self.variants]
        gains = [0 if variant is None else sign for variant, sign in zip(self.variants, signs, strict=True)]
        return RowTables(
            index=torch.tensor(index, dtype=torch.int64, device=device),
            sign=torch.tensor(gains, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class RowTables:
    """`Rows` as device buffers; `write` refills some rows in place."""

    index: Tensor
    sign: Tensor

    def write(self, slots: Sequence[int] | Tensor, rows: Rows) -> None:
        """Give `slots` of this table the variants of `rows`."""
        import torch

        where = torch.as_tensor(slots, dtype=torch.int64, device=self.index.device)
        fresh = rows.tables(self.index.device)
        self.index[where] = fresh.index
        self.sign[where] = fresh.sign

    def take(self, rows: Tensor) -> RowTables:
        """Return the tables of some rows, by index: a prefill of those slots reads them."""
        return RowTables(index=self.index[rows], sign=self.sign[rows])
