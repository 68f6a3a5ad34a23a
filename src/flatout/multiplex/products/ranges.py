"""Thin products over ranges of tokens, each range with the factors of its own variant.

Three of them make a correction and its derivative: *down* to the rank, *up* again (added to what is there, or
as what the base's product is added to), and the *outer* product of the two sides, which is the gradient of a
factor.  They can be had in four ways, and which is fastest depends on the device:

loop      one product per variant at its own rank: least arithmetic, most calls (CPU)
batched   one batched product for all, where every variant has the same number of tokens
dense     every token against the factors of all variants, and what is foreign multiplied by zero: no grouping
          at all, any order of rows, fewest launches (see `trained`), and the only way to mix variants.  It
          is V times the arithmetic, for a correction that bytes bound while V * rank is in the hundreds
grouped   torch's grouped product over ranges of any length (bfloat16, from compute capability 8.0 on)

Shapes: N tokens, V variants, R largest rank, K and O widths.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.ground.decisions import Decision
from flatout.multiplex.rows import VariantRange, are_even

Path = Literal["loop", "batched", "dense", "grouped"]
DENSE_RANKS = 256  # V * R up to which a correction is bound by bytes on current GPUs: computed for an H200


class FactorViews(NamedTuple):
    """What products read of a factor: views, made once, since a step takes hundreds of them."""

    plain: Any
    turned: Any  # with its last two dimensions exchanged


class Products(Protocol):
    """The three thin products; a variant's scale comes in once, by `down` or by the other two.

    x, y and the factors are given as `split` and `factor` make them.
    """

    @property
    def kind(self) -> Hashable:
        """Products of one kind take the same views of a factor."""

    def split(self, x_NK: Tensor) -> Any:
        """Split tokens by their variants."""

    def factor(self, factor_VRK: Tensor) -> FactorViews:
        """Return the views of a factor, or of a factor's gradient."""

    def down(self, x: Any, factor: FactorViews) -> Any:
        """Return the coefficients of every token: x times its variant's factor."""

    def add_up(self, y: Any, coefficients: Any, factor: FactorViews) -> None:
        """Add coefficients times the variant's factor to y."""

    def up(self, coefficients: Any, factor: FactorViews, *, num_tokens: int) -> Tensor:
        """Return coefficients times the variant's factor, [N, K]."""

    def add_outer(self, gradient: FactorViews, coefficients: Any, x: Any) -> None:
        """Add the sum over each variant's tokens of coefficients times x to the gradient of a factor."""


def choose_path(
    ranges: Sequence[VariantRange],
    *,
    device: torch.device,
    dtype: torch.dtype,
    rank: int,
    grouped_mm: bool | None = None,
) -> Decision[Path]:
    """Choose the kind of products for these ranges of tokens."""
    if device.type != "cuda":
        return Decision(
            value="loop",
            reason="arithmetic limits a CPU, and a loop does the least of it",
            source="measured",
        )
    columns = rank * (1 + max(one.variant for one in ranges) - min(one.variant for one in ranges))
    if are_even(ranges):
        return Decision(
            value="batched", reason="every variant has the same number of tokens", source="computed"
        )
    if columns <= DENSE_RANKS:
        return Decision(
            value="dense",
            reason=f"{columns} columns of factors are limited by the bytes of the activations",
            source="computed",
        )
    if grouped_mm is None:
        grouped_mm = dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)
    if grouped_mm and rank % 8 == 0 and _ascending(ranges):
        return Decision(
            value="grouped",
            reason=f"{columns} columns of factors are limited by arithmetic",
            source="computed",
        )
    return Decision(value="dense", reason="this device has no grouped products", source="computed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """One pair of products per variant, at its own rank."""

    ranges: tuple[VariantRange, ...]
    ranks: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def kind(self) -> Hashable:
        return "loop", tuple(one.variant for one in self.ranges)

    def split(self, x_NK: Tensor) -> list[Tensor]:
        return [x_NK[one.start : one.stop] for one in self.ranges]

    def factor(self, factor_VRK: Tensor) -> FactorViews:
        parts = [factor_VRK[one.variant, : self.ranks[one.variant]] for one in self.ranges]
        return FactorViews(parts, [part.T for part in parts])

    def down(self, x: list[Tensor], factor: FactorViews) -> list[Tensor]:
        return [torch.mm(own, turned) for own, turned in zip(x, factor.turned, strict=True)]

    def add_up(self, y: list[Tensor], coefficients: list[Tensor], factor: FactorViews) -> None:
        for one, own, part, plain in zip(self.ranges, y, coefficients, factor.plain, strict=True):
            own.addmm_(part, plain, alpha=self.scales[one.variant])

    def up(self, coefficients: list[Tensor], factor: FactorViews, *, num_tokens: int) -> Tensor:
        y_NK = coefficients[0].new_empty(num_tokens, factor.plain[0].shape[1])
        for one, part, plain in zip(self.ranges, coefficients, factor.plain, strict=True):
            y_NK[one.start : one.stop].addmm_(part, plain, beta=0.0, alpha=self.scales[one.variant])
        return y_NK

    def add_outer(self, gradient: FactorViews, coefficients: list[Tensor], x: list[Tensor]) -> None:
        for one, into, part, own in zip(self.ranges, gradient.plain, coefficients, x, strict=True):
            add_products(into, part.T, own, alpha=self.scales[one.variant])


@dataclass(frozen=True, kw_only=True, slots=True)
class Batched:
    """One batched product over variants `first` ... `last - 1`, which have as many tokens each."""

    first: int
    last: int
    alpha: float  # the scale, where all variants have one
    scales: Tensor | None  # [V, 1, 1], otherwise

    @property
    def kind(self) -> Hashable:
        return "batched", self.first, self.last

    def split(self, x_NK: Tensor) -> Tensor:
        return x_NK.view(self.last - self.first, -1, x_NK.shape[1])

    def factor(self, factor_VRK: Tensor) -> FactorViews:
        own = factor_VRK[self.first : self.last]
        return FactorViews(own, own.mT)

    def down(self, x: Tensor, factor: FactorViews, *, out: Tensor | None = None) -> Tensor:
        coefficients_VNR = torch.bmm(x, factor.turned, out=out)
        return coefficients_VNR if self.scales is None else coefficients_VNR.mul_(self.scales)

    def add_up(self, y: Tensor, coefficients: Tensor, factor: FactorViews) -> None:
        y.baddbmm_(coefficients, factor.plain, alpha=self.alpha)

    def up(self, coefficients: Tensor, factor: FactorViews, *, num_tokens: int) -> Tensor:
        y_NK = coefficients.new_empty(num_tokens, factor.plain.shape[2])
        self.split(y_NK).baddbmm_(coefficients, factor.plain, beta=0.0, alpha=self.alpha)
        return y_NK

    def add_outer(self, gradient: FactorViews, coefficients: Tensor, x: Tensor) -> None:
        add_products(gradient.plain, coefficients.mT, x, alpha=self.alpha)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """Every token against the factors of variants `first` ... `last - 1`; `gain` is 0 where they are foreign.

    The gain [N, (last - first) * R] holds the scale too.  With weights in place of zeros and ones this is a
    mixture of variants.
    """

    first: int
    last: int
    gain: Tensor

    @property
    def kind(self) -> Hashable:
        return "dense", self.first, self.last

    def split(self, x_NK: Tensor) -> Tensor:
        return x_NK

    def factor(self, factor_VRK: Tensor) -> FactorViews:
        flat = factor_VRK[self.first : self.last].flatten(0, 1)
        return FactorViews(flat, flat.T)

    def down(self, x: Tensor, factor: FactorViews) -> Tensor:
        return self.raw(x, factor).mul_(self.gain)

    def raw(self, x: Tensor, factor: FactorViews) -> Tensor:
        return torch.mm(x, factor.turned)

    def add_up(self, y: Tensor, coefficients: Tensor, factor: FactorViews) -> None:
        y.addmm_(coefficients, factor.plain)

    def up(self, coefficients: Tensor, factor: FactorViews, *, num_tokens: int) -> Tensor:
        return torch.mm(coefficients, factor.plain)

    def add_outer(self, gradient: FactorViews, coefficients: Tensor, x: Tensor) -> None:
        add_products(gradient.plain, coefficients.T, x)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """Torch's grouped products; `offsets` [V] int32 are the ends of the variants' tokens."""

    offsets: Tensor
    scales: Tensor  # [N, 1]

    @property
    def kind(self) -> Hashable:
        return "grouped"

    def split(self, x_NK: Tensor) -> Tensor:
        return x_NK

    def factor(self, factor_VRK: Tensor) -> FactorViews:
        return FactorViews(factor_VRK, factor_VRK.mT)

    def down(self, x: Tensor, factor: FactorViews) -> Tensor:
        return F.grouped_mm(x, factor.turned, offs=self.offsets).mul_(self.scales)

    def add_up(self, y: Tensor, coefficients: Tensor, factor: FactorViews) -> None:
        y.add_(F.grouped_mm(coefficients, factor.plain, offs=self.offsets))

    def up(self, coefficients: Tensor, factor: FactorViews, *, num_tokens: int) -> Tensor:
        return F.grouped_mm(coefficients, factor.plain, offs=self.offsets)

    def add_outer(self, gradient: FactorViews, coefficients: Tensor, x: Tensor) -> None:
        gradient.plain.add_(F.grouped_mm(coefficients.T, x, offs=self.offsets))


def products_of(
    path: Path,
    ranges: tuple[VariantRange, ...],
    *,
    ranks: tuple[int, ...],
    scales: tuple[float, ...],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Products:
    """Make the products of one kind for these ranges of tokens."""
    if path == "loop":
        return Loop(ranges=ranges, ranks=ranks, scales=scales)
    first, last = min(one.variant for one in ranges), 1 + max(one.variant for one in ranges)
    if path == "batched":
        own = scales[first:last]
        uniform = len(set(own)) == 1
        column = None if uniform else torch.tensor(own, dtype=dtype, device=device)[:, None, None]
        return Batched(first=first, last=last, alpha=own[0] if uniform else 1.0, scales=column)
    num_tokens = ranges[-1].stop
    if path == "dense":
        gain = torch.zeros(num_tokens, last - first, rank, dtype=dtype, device=device)
        for one in ranges:
            gain[one.start : one.stop, one.variant - first] = scales[one.variant]
        return Dense(first=first, last=last, gain=gain.flatten(1))
    ends, scale = [0] * len(ranks), torch.empty(num_tokens, 1, dtype=dtype, device=device)
    for one in ranges:
        scale[one.start : one.stop] = scales[one.variant]
        ends[one.variant] = one.stop
    for number in range(1, len(ends)):
        ends[number] = max(ends[number], ends[number - 1])
    return Grouped(offsets=torch.tensor(ends, dtype=torch.int32, device=device), scales=scale)


def _ascending(ranges: Sequence[VariantRange]) -> bool:
    return all(a.variant < b.variant for a, b in pairwise(ranges))


def add_products(into: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0) -> None:
    """Add alpha * a b to `into`: matrices or batches of them; `into` may be wider than the operands."""
    add = torch.addmm if into.dim() == 2 else torch.baddbmm
    if into.dtype == a.dtype:
        add(into, a, b, alpha=alpha, out=into)
    elif into.is_cuda and adds_into_wider(into.device, a.dtype):
        add(into, a, b, out_dtype=into.dtype, alpha=alpha, out=into)
    else:
        into.add_(a @ b, alpha=alpha)


def wide_products(a: Tensor, b: Tensor) -> Tensor:
    """Return a b of batches, in float32 where torch gives that for narrower operands."""
    if a.is_cuda and a.dtype != torch.float32 and adds_into_wider(a.device, a.dtype):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b)


@functools.cache
def adds_into_wider(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch adds a half-precision product to a float32 view in place: tried once."""
    wide = torch.ones(2, 16, 64, device=device)
    into, a = wide[:, :, :32], torch.ones(2, 16, 16, device=device, dtype=dtype)
    b = torch.ones(2, 16, 32, device=device, dtype=dtype)
    try:
        torch.baddbmm(into, a, b, out_dtype=torch.float32, alpha=2.0, out=into)
        first = into[0]
        torch.addmm(first, a[0], b[0], out_dtype=torch.float32, alpha=2.0, out=first)
    except (RuntimeError, TypeError):
        return False
    return bool(into[0].eq(65).all() and into[1].eq(33).all() and wide[:, :, 32:].eq(1).all())
