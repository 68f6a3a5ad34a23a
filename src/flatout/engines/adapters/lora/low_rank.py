"""A linear map with another low-rank correction for each range of tokens, and its derivative.

    y[n] = x[n] W^T + b + scale[t] * (x[n] A[t]^T) B[t]        t: the adapter that owns token n

W is shared and frozen, so its product runs once for the tokens of all adapters.  The correction is two thin
products (`products`): down to the rank and up again, and up adds to y where it lies.  The backward is the
same two for x with the factors in each other's place, and two outer products, which are added straight into
the bank's gradients: no gradient of a factor is ever a tensor of its own.

Backwards, up comes first and the base's product adds to it.  A thin product is bound by the bytes it moves,
and reading what it adds to would be half of them; the base's is bound by arithmetic, and reads meanwhile.

Shapes: N tokens, T adapters, R largest rank, K and O widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.engines.adapters.lora.branches import branch_for
from flatout.engines.adapters.lora.products import Dense, Factor, Products


@dataclass(frozen=True, kw_only=True, slots=True)
class Map:
    """One linear map and the views of the bank that belong to it."""

    weight: Tensor  # [O, K]
    bias: Tensor | None
    shrink: Tensor  # [T, R, K]: A
    expand: Tensor  # [T, R, O]: B
    shrink_gradient: Tensor
    expand_gradient: Tensor

    def bound(self, products: Products) -> BoundMap:
        """The map for products of one kind."""
        return BoundMap(
            weight=self.weight,
            bias=self.bias,
            shrink=products.factor(self.shrink),
            expand=products.factor(self.expand),
            shrink_gradient=products.factor(self.shrink_gradient),
            expand_gradient=products.factor(self.expand_gradient),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundMap:
    """A map whose factors are as products of one kind take them."""

    weight: Tensor
    bias: Tensor | None
    shrink: Factor
    expand: Factor
    shrink_gradient: Factor
    expand_gradient: Factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """Inputs of the adapters, each number kept with a probability and then divided by it."""

    keep: float | None  # of all adapters, where they share it
    keep_of_tokens: Tensor | None  # [N, 1], otherwise

    def apply(self, x_NK: Tensor) -> tuple[Tensor, Tensor]:
        """What is left of x, and the mask that `back` wants."""
        if self.keep_of_tokens is None:
            assert self.keep is not None
            return torch.native_dropout(x_NK, 1 - self.keep, True)
        kept = torch.bernoulli(self.keep_of_tokens.expand_as(x_NK)).div_(self.keep_of_tokens)
        mask = kept.to(x_NK.dtype)
        return x_NK * mask, mask

    def back(self, through_NK: Tensor, mask: Tensor) -> Tensor:
        """The gradient to x of what came through to what was kept; `through` is spent."""
        if self.keep_of_tokens is None:
            assert self.keep is not None
            gradient: Tensor = torch.ops.aten.native_dropout_backward(through_NK, mask, 1 / self.keep)
            return gradient
        return through_NK.mul_(mask)


def adapted_linear(
    x: Tensor,
    *,
    of: BoundMap,
    products: Products,
    anchor: Tensor,
    dropout: Dropout | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    """Apply the map with its correction.

    `anchor` is any tensor that requires gradients: the first layer's x requires none, and the factors, whose
    gradients go to the bank, are no inputs.  `gain` replaces the gain of dense products, and is
    differentiable.
    """
    y: Tensor = _AdaptedLinear.apply(  # type: ignore[no-untyped-call]
        x, anchor, gain, of, products, dropout
    )
    return y


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        gain: Tensor | None,
        of: BoundMap,
        products: Products,
        dropout: Dropout | None,
    ) -> Tensor:
        x_NK = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        inside_NK, mask = (x_NK, None) if dropout is None else dropout.apply(x_NK)
        inside = products.split(inside_NK)
        raw = None
        branch = branch_for(x_NK)
        with branch.beside():
            if gain is None:
                coefficients = products.down(inside, of.shrink)
            else:
                assert isinstance(products, Dense)
                raw = products.raw(inside, of.shrink)
                coefficients = raw * gain
        y_NO = F.linear(x_NK, of.weight, of.bias)
        branch.join()
        products.add_up(products.split(y_NO), coefficients, of.expand)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(inside_NK, mask, gain, raw if ctx.needs_input_grad[2] else None)
            ctx.coefficients, ctx.of, ctx.products, ctx.dropout = coefficients, of, products, dropout
        return y_NO if x.ndim == 2 else y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inside_NK, mask, gain, raw = ctx.saved_tensors
        of: BoundMap = ctx.of
        products: Products = ctx.products
        dy_NO = dy if dy.ndim == 2 else dy.reshape(-1, dy.shape[-1])
        outside = products.split(dy_NO)
        gain_gradient = None
        branch = branch_for(dy_NO)
        with branch.beside():
            products.add_outer(of.expand_gradient, ctx.coefficients, outside)
        if gain is None:
            back = products.down(outside, of.expand)
        else:
            assert isinstance(products, Dense)
            back = products.raw(outside, of.expand)
            gain_gradient = back * raw if raw is not None else None
            back = back * gain
        with branch.beside():
            products.add_outer(of.shrink_gradient, back, products.split(inside_NK))
        dx = None
        if ctx.needs_input_grad[0]:
            dx_NK = products.up(back, of.shrink, num_tokens=len(dy_NO))
            if mask is not None:
                dx_NK = ctx.dropout.back(dx_NK, mask)
            dx_NK.addmm_(dy_NO, of.weight)
            dx = dx_NK if dy.ndim == 2 else dx_NK.view(*dy.shape[:-1], -1)
        branch.join()
        return dx, None, gain_gradient, None, None, None
