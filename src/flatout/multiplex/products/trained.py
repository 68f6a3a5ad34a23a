"""Linear maps with another low-rank correction for each range of tokens, and their derivative.

    y[n] = x[n] W^T + b + scale[v] * (x[n] A[v]^T) B[v]        v: the variant that owns token n

W is shared and frozen, so its product runs once for the tokens of all variants.  The correction is two thin
products (`ranges`): down to the rank and up again, and up adds to y where it lies.  The backward is the same
two for x with the factors in each other's place, and two outer products, which are added straight into the
caller's gradients: no gradient of a factor is ever a tensor of its own.

In the backward, *up* comes first and the base's product adds to it.  A thin product is bound by the bytes it
moves, and reading its addend would be half of them; the base's is bound by arithmetic, and reads meanwhile.

Maps that read the same x, like query, key and value, share one product with their weights stacked, so x is
read once.  Dense products go further: one batched product serves the factors of all maps.  Batched products
stack the shrinking factors of each variant in a small copy: x is read once to go down, once for the gradients
of those factors, and its own gradient is written once.  The maps share the dropout of x.

Shapes: N tokens, M maps, V variants, R largest rank, C = V * R, K and O widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.multiplex.products.ranges import (
    Batched,
    Dense,
    FactorViews,
    Products,
    add_products,
    wide_products,
)
from flatout.multiplex.products.side_stream import branch_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Maps:
    """Linear maps of one input, stacked, and where their factors and the gradients of those lie."""

    weight: Tensor  # [M * O, K]
    bias: Tensor | None  # [M * O]
    shrink: Tensor  # [M, V, R, K]: A
    expand: Tensor  # [M, V, R, O]: B
    shrink_gradient: Tensor
    expand_gradient: Tensor

    def bound(self, products: Products) -> BoundMaps:
        """Bind the maps to products of one kind."""
        if len(self.shrink) > 1 and isinstance(products, Dense):
            return _AllAtOnce(self, products)
        if len(self.shrink) > 1 and isinstance(products, Batched):
            return _ShrunkTogether(self, products)
        return BoundMaps(self, products)


class BoundMaps:
    """Maps whose factors are as products of one kind take them; here the corrections run map by map."""

    def __init__(self, maps: Maps, products: Products) -> None:
        self.num = len(maps.shrink)
        self.weight, self.bias = maps.weight, maps.bias
        self.weights = maps.weight.chunk(self.num)
        self.shrinks, self.expands, self.shrink_gradients, self.expand_gradients = (
            [products.factor(one) for one in factors]
            for factors in (maps.shrink, maps.expand, maps.shrink_gradient, maps.expand_gradient)
        )

    def down(self, products: Any, inside_NK: Tensor, gain: Tensor | None) -> tuple[Any, Any]:
        """Return the coefficients of all maps, and what the backward needs beside them."""
        inside = products.split(inside_NK)
        if gain is None:
            return [products.down(inside, shrink) for shrink in self.shrinks], None
        raws = [products.raw(inside, shrink) for shrink in self.shrinks]
        return [raw * gain for raw in raws], raws

    def add_up(self, products: Any, y: Tensor, coefficients: Any) -> None:
        """Add the corrections to y [N, M * O]."""
        for y_NO, own, expand in zip(self._parts(y), coefficients, self.expands, strict=True):
            products.add_up(products.split(y_NO), own, expand)

    def outside(self, products: Any, dys: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return the gradients to y as the base's products take them, and as the thin ones do."""
        flat = [dy if dy.ndim == 2 else dy.reshape(-1, dy.shape[-1]) for dy in dys]
        return flat, [products.split(dy_NO) for dy_NO in flat]

    def add_expand_gradients(self, products: Any, coefficients: Any, outside: Any) -> None:
        for gradient, own, dy in zip(self.expand_gradients, coefficients, outside, strict=True):
            products.add_outer(gradient, own, dy)

    def back(
        self, products: Any, outside: Any, *, kept: Any, gain: Tensor | None
    ) -> tuple[Any, Tensor | None]:
        """Return the coefficients of the gradients, and the gradient to the gain."""
        if gain is None:
            return [products.down(dy, expand) for dy, expand in zip(outside, self.expands, strict=True)], None
        raws = [products.raw(dy, expand) for dy, expand in zip(outside, self.expands, strict=True)]
        to_gain = sum(raw * before for raw, before in zip(raws, kept, strict=True))
        return [raw * gain for raw in raws], to_gain

    def add_shrink_gradients(self, products: Any, back: Any, inside_NK: Tensor) -> None:
        inside = products.split(inside_NK)
        for gradient, own in zip(self.shrink_gradients, back, strict=True):
            products.add_outer(gradient, own, inside)

    def up(self, products: Any, back: Any, *, kept: Any, num_tokens: int) -> Tensor:
        """Return the gradient to x through the corrections."""
        dx_NK: Tensor = products.up(back[0], self.shrinks[0], num_tokens=num_tokens)
        if self.num > 1:
            into = products.split(dx_NK)
            for own, shrink in zip(back[1:], self.shrinks[1:], strict=True):
                products.add_up(into, own, shrink)
        return dx_NK

    def add_base(self, dx_NK: Tensor, flat: Any) -> None:
        """Add what the weights give: map by map, since the gradients of the maps lie apart."""
        for dy_NO, weight in zip(flat, self.weights, strict=True):
            dx_NK.addmm_(dy_NO, weight)

    def _parts(self, y: Tensor) -> Sequence[Tensor]:
        return (y,) if self.num == 1 else y.chunk(self.num, dim=-1)


class _ShrunkTogether(BoundMaps):
    """Batched products: the shrinking factors stacked, the expanding ones map by map."""

    def __init__(self, maps: Maps, products: Batched) -> None:
        super().__init__(maps, products)
        own = slice(products.first, products.last)
        self.shrink_VMRK, self.shrink_gradient_VMRK = (
            factor[:, own].transpose(0, 1) for factor in (maps.shrink, maps.shrink_gradient)
        )

    def down(self, products: Batched, inside_NK: Tensor, gain: Tensor | None) -> tuple[Any, Any]:
        stacked = self.shrink_VMRK.flatten(1, 2)  # [V, M * R, K]: a copy, of the size of the factors
        shrink = FactorViews(stacked, stacked.mT)
        return products.down(products.split(inside_NK), shrink), shrink

    def add_up(self, products: Batched, y: Tensor, coefficients: Tensor) -> None:
        super().add_up(products, y, coefficients.chunk(self.num, dim=2))

    def add_expand_gradients(self, products: Batched, coefficients: Tensor, outside: Any) -> None:
        super().add_expand_gradients(products, coefficients.chunk(self.num, dim=2), outside)

    def back(
        self, products: Batched, outside: Any, *, kept: Any, gain: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rank = self.shrink_VMRK.shape[2]
        back = outside[0].new_empty(*outside[0].shape[:2], self.num * rank)
        for dy, expand, own in zip(outside, self.expands, back.split(rank, dim=2), strict=True):
            products.down(dy, expand, out=own)
        return back, None

    def add_shrink_gradients(self, products: Batched, back: Tensor, inside_NK: Tensor) -> None:
        outer = wide_products(back.mT, products.split(inside_NK))
        into = self.shrink_gradient_VMRK
        into.add_(outer.view(into.shape), alpha=products.alpha)

    def up(self, products: Batched, back: Tensor, *, kept: Any, num_tokens: int) -> Tensor:
        return products.up(back, kept, num_tokens=num_tokens)


class _AllAtOnce(BoundMaps):
    """Dense products: the corrections of all maps in one batched product over [M, N, C]."""

    def __init__(self, maps: Maps, products: Dense) -> None:
        super().__init__(maps, products)
        self.shrink, self.expand, self.shrink_gradient, self.expand_gradient = (
            factors[:, products.first : products.last].flatten(1, 2)
            for factors in (maps.shrink, maps.expand, maps.shrink_gradient, maps.expand_gradient)
        )
        self.shrink_turned, self.expand_turned = self.shrink.mT, self.expand.mT

    def down(self, products: Dense, inside_NK: Tensor, gain: Tensor | None) -> tuple[Any, Any]:
        raw_MNC = torch.bmm(inside_NK.expand(self.num, -1, -1), self.shrink_turned)
        return (raw_MNC.mul_(products.gain), None) if gain is None else (raw_MNC * gain, raw_MNC)

    def add_up(self, products: Dense, y: Tensor, coefficients: Tensor) -> None:
        self._by_map(y).baddbmm_(coefficients, self.expand)

    def outside(self, products: Dense, dys: Sequence[Tensor]) -> tuple[Any, Any]:
        dy = torch.cat([dy.reshape(-1, dy.shape[-1]) for dy in dys], dim=1)
        return dy, self._by_map(dy)

    def add_expand_gradients(self, products: Dense, coefficients: Tensor, outside: Tensor) -> None:
        add_products(self.expand_gradient, coefficients.mT, outside)

    def back(
        self, products: Dense, outside: Tensor, *, kept: Any, gain: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        back_MNC = torch.bmm(outside, self.expand_turned)
        to_gain = None if gain is None else (back_MNC * kept).sum(0)
        return back_MNC.mul_(products.gain if gain is None else gain), to_gain

    def add_shrink_gradients(self, products: Dense, back: Tensor, inside_NK: Tensor) -> None:
        add_products(self.shrink_gradient, back.mT, inside_NK.expand(self.num, -1, -1))

    def add_base(self, dx_NK: Tensor, flat: Tensor) -> None:
        dx_NK.addmm_(flat, self.weight)

    def _by_map(self, y: Tensor) -> Tensor:
        """View [N, M * O] as [M, N, O]."""
        return y.view(len(y), self.num, -1).transpose(0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """Inputs of the corrections, each number kept with a probability and then divided by it."""

    keep: float | None  # of all variants, where they share it
    keep_of_tokens: Tensor | None  # [N, 1], otherwise

    def apply(self, x_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return x with dropout applied, and the mask that `back` wants."""
        if self.keep_of_tokens is None:
            assert self.keep is not None
            return torch.native_dropout(x_NK, 1 - self.keep, True)
        kept = torch.bernoulli(self.keep_of_tokens.expand_as(x_NK)).div_(self.keep_of_tokens)
        mask = kept.to(x_NK.dtype)
        return x_NK * mask, mask

    def back(self, through_NK: Tensor, mask: Tensor) -> Tensor:
        """Return the gradient to x from the gradient to the kept part; `through` is overwritten."""
        if self.keep_of_tokens is None:
            assert self.keep is not None
            gradient: Tensor = torch.ops.aten.native_dropout_backward(through_NK, mask, 1 / self.keep)
            return gradient
        return through_NK.mul_(mask)


def corrected_maps(
    x: Tensor,
    *,
    maps: BoundMaps,
    products: Products,
    anchor: Tensor,
    dropout: Dropout | None = None,
    gain: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the corrected result of each map.

    `anchor` is any tensor that requires gradients: the first layer's x requires none, and the factors, whose
    gradients go to the caller's buffers, are not inputs.  `gain` is the gain of dense products if it needs a
    gradient.
    """
    results: tuple[Tensor, ...] = _Corrected.apply(  # type: ignore[no-untyped-call]
        x, anchor, gain, maps, products, dropout
    )
    return results


class _Corrected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        gain: Tensor | None,
        maps: BoundMaps,
        products: Products,
        dropout: Dropout | None,
    ) -> tuple[Tensor, ...]:
        x_NK = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        inside_NK, mask = (x_NK, None) if dropout is None else dropout.apply(x_NK)
        branch = branch_for(x_NK)
        with branch.beside():
            coefficients, kept = maps.down(products, inside_NK, gain)
        y = F.linear(x_NK, maps.weight, maps.bias)
        branch.join()
        maps.add_up(products, y, coefficients)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(inside_NK, mask, gain)
            ctx.coefficients, ctx.kept = coefficients, kept
            ctx.maps, ctx.products, ctx.dropout = maps, products, dropout
        return tuple(maps._parts(y if x.ndim == 2 else y.view(*x.shape[:-1], -1)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        inside_NK, mask, gain = ctx.saved_tensors
        maps: BoundMaps = ctx.maps
        products: Products = ctx.products
        flat, outside = maps.outside(products, dys)
        branch = branch_for(inside_NK)
        with branch.beside():
            maps.add_expand_gradients(products, ctx.coefficients, outside)
        back, gain_gradient = maps.back(products, outside, kept=ctx.kept, gain=gain)
        with branch.beside():
            maps.add_shrink_gradients(products, back, inside_NK)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = maps.up(products, back, kept=ctx.kept, num_tokens=len(inside_NK))
            if mask is not None:
                dx = ctx.dropout.back(dx, mask)
            maps.add_base(dx, flat)
            dx = dx if dys[0].ndim == 2 else dx.view(*dys[0].shape[:-1], -1)
        branch.join()
        return dx, None, gain_gradient, None, None, None
