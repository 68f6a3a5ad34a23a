"""Thin products over ranges of tokens, each range with the factors of its own adapter.

Three of them make a correction and its derivative: *down* to the rank, *up* again (added to what is there, or
as what the base's product is added to), and the *outer* product of the two sides, which is the gradient of a
factor.  They can be had in four ways, and which is fastest depends on the device:

loop      one product per adapter at its own rank: least arithmetic, most calls (CPU)
batched   one batched product for all, where every adapter has the same number of tokens
dense     every token against the factors of all adapters, and what is foreign multiplied by zero: no grouping
          at all, any order of rows, fewest launches (see `siblings`), and the only way to mix adapters.  It
          is T times the arithmetic, for a correction that bytes bound while T * rank is in the hundreds
grouped   torch's grouped product over ranges of any length (bfloat16, from compute capability 8.0 on)

Shapes: N tokens, T adapters, R largest rank, K and O widths.
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

from flatout.decisions import Decision
from flatout.engines.adapters.lora.blocks import Span

Path = Literal["loop", "batched", "dense", "grouped"]
DENSE_RANKS = 256  # T * R up to which a correction is bound by bytes on current GPUs: computed for an H200


class Factor(NamedTuple):
    """What products read of a factor of the bank: views, made once, since a step takes hundreds of them."""

    plain: Any
    turned: Any  # with its last two dimensions exchanged


class Products(Protocol):
    """The three thin products; an adapter's scale comes in once, by `down` or by the other two.

    x, y and the factors are given as `split` and `factor` make them.
    """

    @property
    def kind(self) -> Hashable:
        """Products of one kind take the same views of a factor."""

    def split(self, x_NK: Tensor) -> Any:
        """Tokens by their adapters."""

    def factor(self, factor_TRK: Tensor) -> Factor:
        """A factor, or the gradient of one."""

    def down(self, x: Any, factor: Factor) -> Any:
        """The coefficients of every token: x times its adapter's factor."""

    def add_up(self, y: Any, coefficients: Any, factor: Factor) -> None:
        """Add coefficients times the adapter's factor to y."""

    def up(self, coefficients: Any, factor: Factor, *, num_tokens: int) -> Tensor:
        """Coefficients times the adapter's factor, [N, K]."""

    def add_outer(self, gradient: Factor, coefficients: Any, x: Any) -> None:
        """Add the sum over each adapter's tokens of coefficients times x to the gradient of a factor."""


def choose_path(
    spans: Sequence[Span],
    *,
    device: torch.device,
    dtype: torch.dtype,
    rank: int,
    grouped_mm: bool | None = None,
) -> Decision[Path]:
    """The kind of products for these ranges of tokens."""
    if device.type != "cuda":
        return Decision(
            value="loop",
            reason="a CPU is bound by arithmetic, and a loop does the least",
            source="measured",
        )
    columns = rank * (1 + max(span.adapter for span in spans) - min(span.adapter for span in spans))
    if _equal(spans):
        return Decision(
            value="batched", reason="every adapter has the same number of tokens", source="computed"
        )
    if columns <= DENSE_RANKS:
        return Decision(
            value="dense",
            reason=f"{columns} columns of factors are bound by the bytes of the activations",
            source="computed",
        )
    if grouped_mm is None:
        grouped_mm = dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)
    if grouped_mm and rank % 8 == 0 and _ascending(spans):
        return Decision(
            value="grouped",
            reason=f"{columns} columns of factors are bound by arithmetic",
            source="computed",
        )
    return Decision(value="dense", reason="this device has no grouped products", source="computed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """One pair of products per adapter, at its own rank."""

    spans: tuple[Span, ...]
    ranks: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def kind(self) -> Hashable:
        return "loop", tuple(span.adapter for span in self.spans)

    def split(self, x_NK: Tensor) -> list[Tensor]:
        return [x_NK[span.start : span.stop] for span in self.spans]

    def factor(self, factor_TRK: Tensor) -> Factor:
        parts = [factor_TRK[span.adapter, : self.ranks[span.adapter]] for span in self.spans]
        return Factor(parts, [part.T for part in parts])

    def down(self, x: list[Tensor], factor: Factor) -> list[Tensor]:
        return [torch.mm(own, turned) for own, turned in zip(x, factor.turned, strict=True)]

    def add_up(self, y: list[Tensor], coefficients: list[Tensor], factor: Factor) -> None:
        for span, own, part, plain in zip(self.spans, y, coefficients, factor.plain, strict=True):
            own.addmm_(part, plain, alpha=self.scales[span.adapter])

    def up(self, coefficients: list[Tensor], factor: Factor, *, num_tokens: int) -> Tensor:
        y_NK = coefficients[0].new_empty(num_tokens, factor.plain[0].shape[1])
        for span, part, plain in zip(self.spans, coefficients, factor.plain, strict=True):
            y_NK[span.start : span.stop].addmm_(part, plain, beta=0.0, alpha=self.scales[span.adapter])
        return y_NK

    def add_outer(self, gradient: Factor, coefficients: list[Tensor], x: list[Tensor]) -> None:
        for span, into, part, own in zip(self.spans, gradient.plain, coefficients, x, strict=True):
            add_product(into, part.T, own, alpha=self.scales[span.adapter])


@dataclass(frozen=True, kw_only=True, slots=True)
class Batched:
    """One batched product over adapters `first` ... `last - 1`, which have as many tokens each."""

    first: int
    last: int
    alpha: float  # the scale, where all adapters have one
    scales: Tensor | None  # [T, 1, 1], otherwise

    @property
    def kind(self) -> Hashable:
        return "batched", self.first, self.last

    def split(self, x_NK: Tensor) -> Tensor:
        return x_NK.view(self.last - self.first, -1, x_NK.shape[1])

    def factor(self, factor_TRK: Tensor) -> Factor:
        own = factor_TRK[self.first : self.last]
        return Factor(own, own.mT)

    def down(self, x: Tensor, factor: Factor, *, out: Tensor | None = None) -> Tensor:
        coefficients_TNR = torch.bmm(x, factor.turned, out=out)
        return coefficients_TNR if self.scales is None else coefficients_TNR.mul_(self.scales)

    def add_up(self, y: Tensor, coefficients: Tensor, factor: Factor) -> None:
        y.baddbmm_(coefficients, factor.plain, alpha=self.alpha)

    def up(self, coefficients: Tensor, factor: Factor, *, num_tokens: int) -> Tensor:
        y_NK = coefficients.new_empty(num_tokens, factor.plain.shape[2])
        self.split(y_NK).baddbmm_(coefficients, factor.plain, beta=0.0, alpha=self.alpha)
        return y_NK

    def add_outer(self, gradient: Factor, coefficients: Tensor, x: Tensor) -> None:
        add_products(gradient.plain, coefficients.mT, x, alpha=self.alpha)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """Every token against the factors of adapters `first` ... `last - 1`; `gain` is 0 where they are foreign.

    The gain [N, (last - first) * R] holds the scale too.  With weights in place of zeros and ones this is a
    mixture of adapters.
    """

    first: int
    last: int
    gain: Tensor

    @property
    def kind(self) -> Hashable:
        return "dense", self.first, self.last

    def split(self, x_NK: Tensor) -> Tensor:
        return x_NK

    def factor(self, factor_TRK: Tensor) -> Factor:
        flat = factor_TRK[self.first : self.last].flatten(0, 1)
        return Factor(flat, flat.T)

    def down(self, x: Tensor, factor: Factor) -> Tensor:
        return self.raw(x, factor).mul_(self.gain)

    def raw(self, x: Tensor, factor: Factor) -> Tensor:
        return torch.mm(x, factor.turned)

    def add_up(self, y: Tensor, coefficients: Tensor, factor: Factor) -> None:
        y.addmm_(coefficients, factor.plain)

    def up(self, coefficients: Tensor, factor: Factor, *, num_tokens: int) -> Tensor:
        return torch.mm(coefficients, factor.plain)

    def add_outer(self, gradient: Factor, coefficients: Tensor, x: Tensor) -> None:
        add_product(gradient.plain, coefficients.T, x)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """Torch's grouped products; `offsets` [T] int32 are the ends of the adapters' tokens."""

    offsets: Tensor
    scales: Tensor  # [N, 1]

    @property
    def kind(self) -> Hashable:
        return "grouped"

    def split(self, x_NK: Tensor) -> Tensor:
        return x_NK

    def factor(self, factor_TRK: Tensor) -> Factor:
        return Factor(factor_TRK, factor_TRK.mT)

    def down(self, x: Tensor, factor: Factor) -> Tensor:
        return F.grouped_mm(x, factor.turned, offs=self.offsets).mul_(self.scales)

    def add_up(self, y: Tensor, coefficients: Tensor, factor: Factor) -> None:
        y.add_(F.grouped_mm(coefficients, factor.plain, offs=self.offsets))

    def up(self, coefficients: Tensor, factor: Factor, *, num_tokens: int) -> Tensor:
        return F.grouped_mm(coefficients, factor.plain, offs=self.offsets)

    def add_outer(self, gradient: Factor, coefficients: Tensor, x: Tensor) -> None:
        gradient.plain.add_(F.grouped_mm(coefficients.T, x, offs=self.offsets))


def products_of(
    path: Path,
    spans: tuple[Span, ...],
    *,
    ranks: tuple[int, ...],
    scales: tuple[float, ...],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Products:
    """The products of one kind for these ranges of tokens."""
    if path == "loop":
        return Loop(spans=spans, ranks=ranks, scales=scales)
    first, last = min(span.adapter for span in spans), 1 + max(span.adapter for span in spans)
    if path == "batched":
        own = scales[first:last]
        uniform = len(set(own)) == 1
        column = None if uniform else torch.tensor(own, dtype=dtype, device=device)[:, None, None]
        return Batched(first=first, last=last, alpha=own[0] if uniform else 1.0, scales=column)
    num_tokens = spans[-1].stop
    if path == "dense":
        gain = torch.zeros(num_tokens, last - first, rank, dtype=dtype, device=device)
        for span in spans:
            gain[span.start : span.stop, span.adapter - first] = scales[span.adapter]
        return Dense(first=first, last=last, gain=gain.flatten(1))
    ends, scale = [0] * len(ranks), torch.empty(num_tokens, 1, dtype=dtype, device=device)
    for span in spans:
        scale[span.start : span.stop] = scales[span.adapter]
        ends[span.adapter] = span.stop
    for number in range(1, len(ends)):
        ends[number] = max(ends[number], ends[number - 1])
    return Grouped(offsets=torch.tensor(ends, dtype=torch.int32, device=device), scales=scale)


def _equal(spans: Sequence[Span]) -> bool:
    """Whether the ranges are of one length and their adapters neighbours in order."""
    first, size = spans[0].adapter, spans[0].stop - spans[0].start
    return all(
        span.adapter == first + place and span.stop - span.start == size for place, span in enumerate(spans)
    )


def _ascending(spans: Sequence[Span]) -> bool:
    return all(a.adapter < b.adapter for a, b in pairwise(spans))


def add_product(into: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0) -> None:
    """into += alpha * a b, where `into` may be wider than the operands."""
    if into.dtype == a.dtype:
        into.addmm_(a, b, alpha=alpha)
    elif into.is_cuda and adds_into_wider(into.device, a.dtype):
        torch.addmm(into, a, b, out_dtype=into.dtype, alpha=alpha, out=into)
    else:
        into.add_(a @ b, alpha=alpha)


def add_products(into: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0) -> None:
    """The same for batches."""
    if into.dtype == a.dtype:
        into.baddbmm_(a, b, alpha=alpha)
    elif into.is_cuda and adds_into_wider(into.device, a.dtype):
        torch.baddbmm(into, a, b, out_dtype=into.dtype, alpha=alpha, out=into)
    else:
        into.add_(torch.bmm(a, b), alpha=alpha)


def wide_products(a: Tensor, b: Tensor) -> Tensor:
    """Batches of a b, in float32 where torch gives that for narrower operands."""
    if a.is_cuda and a.dtype != torch.float32 and adds_into_wider(a.device, a.dtype):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b)


@functools.cache
def adds_into_wider(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch adds a product in half precision to a float32 view in place: tried once on small ones."""
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
