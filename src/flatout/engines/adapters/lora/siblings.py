"""Linear maps that read the same input, like query, key and value, corrected together.

Maps that share x share one product with their weights stacked, so x is read once, and their gradients to x
add up within products.  Dense products go further: the factors of the maps lie at equal distances in the
bank, so one batched product serves all.  For three maps that is four kernels forwards instead of twelve.
Batched products stack the shrinking factors of each adapter in a small copy: x is read once to go down, once
for the gradients of those factors, and its own gradient is written once.  The maps share the dropout of x.

Shapes: N tokens, M maps, T adapters, R largest rank, C = T * R, K and O widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.engines.adapters.lora.bank import AdapterBank, Site
from flatout.engines.adapters.lora.branches import branch_for
from flatout.engines.adapters.lora.low_rank import Dropout
from flatout.engines.adapters.lora.products import (
    Batched,
    Dense,
    Factor,
    Products,
    add_products,
    wide_products,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacked:
    """Maps of the same input and the views of the bank that hold their factors, adapters * rank as one."""

    num: int
    num_adapters: int
    weight: Tensor  # [M * O, K]
    bias: Tensor | None  # [M * O]
    shrink: Tensor  # [M, C, K]
    expand: Tensor  # [M, C, O]
    shrink_gradient: Tensor
    expand_gradient: Tensor

    def bound(self, products: Products) -> BoundStack:
        """The maps for products of one kind."""
        factors = self.shrink, self.expand, self.shrink_gradient, self.expand_gradient
        if isinstance(products, Dense):
            rank = self.shrink.shape[1] // self.num_adapters
            own = slice(products.first * rank, products.last * rank)
            views = [Factor(factor[:, own], factor[:, own].mT) for factor in factors]
        else:
            of_maps = [factor.view(self.num, self.num_adapters, -1, factor.shape[2]) for factor in factors]
            views = [Factor([products.factor(one) for one in each], None) for each in of_maps]
            if isinstance(products, Batched):
                own = slice(products.first, products.last)
                for place in (0, 2):
                    views[place] = Factor(of_maps[place][:, own].transpose(0, 1), None)
        return BoundStack(
            num=self.num,
            weight=self.weight,
            weights=self.weight.chunk(self.num),
            bias=self.bias,
            shrink=views[0],
            shrinks=tuple(views[0].plain),
            expand=views[1],
            shrink_gradient=views[2],
            expand_gradient=views[3],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundStack:
    """Stacked maps whose factors are as products of one kind take them.

    Of dense products a factor is that of all maps [M, C, width]; of others `plain` lists one per map, but of
    batched ones what shrinks, and its gradient, are [T, M, R, K].
    """

    num: int
    weight: Tensor
    weights: tuple[Tensor, ...]  # map by map
    bias: Tensor | None
    shrink: Factor
    shrinks: tuple[Any, ...]  # map by map
    expand: Factor
    shrink_gradient: Factor
    expand_gradient: Factor


def stackable(sites: Sequence[Site]) -> bool:
    """Whether maps have one shape and their factors lie at equal distances."""
    first = sites[0]
    step = sites[1].start - first.start if len(sites) > 1 else 0
    return len(sites) > 1 and all(
        (site.num_in, site.num_out) == (first.num_in, first.num_out)
        and site.start == first.start + place * step
        for place, site in enumerate(sites)
    )


def stack(
    bank: AdapterBank, sites: Sequence[Site], *, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Stacked:
    """Maps that are `stackable`, stacked; the weights are copied, the factors are views."""
    first, step = sites[0], sites[1].start - sites[0].start
    columns = len(bank) * bank.rank

    def view(of: Tensor, part: slice) -> Tensor:
        shape, strides = (len(sites), columns, part.stop - part.start), (step, bank.width, 1)
        return of.as_strided(shape, strides, part.start)

    known = [bias for bias in biases if bias is not None]
    return Stacked(
        num=len(sites),
        num_adapters=len(bank),
        weight=torch.cat([weight.detach() for weight in weights]),
        bias=torch.cat([bias.detach() for bias in known]) if len(known) == len(sites) else None,
        shrink=view(bank.working, first.shrink),
        expand=view(bank.working, first.expand),
        shrink_gradient=view(bank.gradients, first.shrink),
        expand_gradient=view(bank.gradients, first.expand),
    )


def adapted_siblings(
    x: Tensor,
    *,
    of: BoundStack,
    products: Products,
    anchor: Tensor,
    dropout: Dropout | None = None,
    gain: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """What `low_rank.adapted_linear` gives for each of the maps; `gain` goes with dense products only."""
    function: Any = _Siblings
    if isinstance(products, Dense):
        function = _DenseSiblings
    elif isinstance(products, Batched):
        function = _BatchedSiblings
    results: tuple[Tensor, ...] = function.apply(x, anchor, gain, of, products, dropout)
    return results


class _Siblings(torch.autograd.Function):
    """The base together, the corrections map by map."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        gain: None,
        of: BoundStack,
        products: Products,
        dropout: Dropout | None,
    ) -> tuple[Tensor, ...]:
        x_NK = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        inside_NK, mask = (x_NK, None) if dropout is None else dropout.apply(x_NK)
        inside = products.split(inside_NK)
        branch = branch_for(x_NK)
        with branch.beside():
            ctx.coefficients = [products.down(inside, shrink) for shrink in of.shrinks]
        y = F.linear(x_NK, of.weight, of.bias)
        branch.join()
        for y_NO, own, expand in zip(y.chunk(of.num, dim=1), ctx.coefficients, of.expand.plain, strict=True):
            products.add_up(products.split(y_NO), own, expand)
        ctx.save_for_backward(inside_NK, mask)
        ctx.of, ctx.products, ctx.dropout = of, products, dropout
        return y.view(*x.shape[:-1], -1).chunk(of.num, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        inside_NK, mask = ctx.saved_tensors
        of: BoundStack = ctx.of
        products: Products = ctx.products
        dys_NO = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
        inside, backs = products.split(inside_NK), []
        branch = branch_for(inside_NK)
        for dy_NO, own, expand, expand_gradient, shrink_gradient in zip(
            dys_NO,
            ctx.coefficients,
            of.expand.plain,
            of.expand_gradient.plain,
            of.shrink_gradient.plain,
            strict=True,
        ):
            outside = products.split(dy_NO)
            backs.append(products.down(outside, expand))
            with branch.beside():
                products.add_outer(expand_gradient, own, outside)
                products.add_outer(shrink_gradient, backs[-1], inside)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = products.up(backs[0], of.shrinks[0], num_tokens=len(inside_NK))
            into = products.split(dx)
            for back, shrink in zip(backs[1:], of.shrinks[1:], strict=True):
                products.add_up(into, back, shrink)
            if mask is not None:
                dx = ctx.dropout.back(dx, mask)
            dx = _add_base(dx, dys_NO, of).view(*dys[0].shape[:-1], -1)
        branch.join()
        return dx, None, None, None, None, None


class _BatchedSiblings(torch.autograd.Function):
    """The base together, the shrinking factors stacked, the expanding ones map by map."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        gain: None,
        of: BoundStack,
        products: Batched,
        dropout: Dropout | None,
    ) -> tuple[Tensor, ...]:
        x_NK = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        inside_NK, mask = (x_NK, None) if dropout is None else dropout.apply(x_NK)
        branch = branch_for(x_NK)
        with branch.beside():
            stacked = of.shrink.plain.flatten(1, 2)  # [T, M * R, K]: a copy, of the size of the factors
            shrink = Factor(stacked, stacked.mT)
            coefficients = products.down(products.split(inside_NK), shrink)
        y = F.linear(x_NK, of.weight, of.bias)
        branch.join()
        for y_NO, own, expand in zip(
            y.chunk(of.num, dim=1), coefficients.chunk(of.num, dim=2), of.expand.plain, strict=True
        ):
            products.add_up(products.split(y_NO), own, expand)
        ctx.save_for_backward(inside_NK, mask)
        ctx.coefficients, ctx.shrink = coefficients, shrink
        ctx.of, ctx.products, ctx.dropout = of, products, dropout
        return y.view(*x.shape[:-1], -1).chunk(of.num, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        inside_NK, mask = ctx.saved_tensors
        of: BoundStack = ctx.of
        products: Batched = ctx.products
        dys_NO = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
        back = torch.empty_like(ctx.coefficients)
        branch = branch_for(inside_NK)
        for dy_NO, own, own_back, expand, expand_gradient in zip(
            dys_NO,
            ctx.coefficients.chunk(of.num, dim=2),
            back.chunk(of.num, dim=2),
            of.expand.plain,
            of.expand_gradient.plain,
            strict=True,
        ):
            outside = products.split(dy_NO)
            with branch.beside():
                products.add_outer(expand_gradient, own, outside)
            products.down(outside, expand, out=own_back)
        gradient_TMRK = of.shrink_gradient.plain
        with branch.beside():
            outer = wide_products(back.mT, products.split(inside_NK))
            gradient_TMRK.add_(outer.view(gradient_TMRK.shape), alpha=products.alpha)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = products.up(back, ctx.shrink, num_tokens=len(inside_NK))
            if mask is not None:
                dx = ctx.dropout.back(dx, mask)
            dx = _add_base(dx, dys_NO, of).view(*dys[0].shape[:-1], -1)
        branch.join()
        return dx, None, None, None, None, None


class _DenseSiblings(torch.autograd.Function):
    """The corrections of all maps in one batched product."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        gain: Tensor | None,
        of: BoundStack,
        products: Dense,
        dropout: Dropout | None,
    ) -> tuple[Tensor, ...]:
        x_NK = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        inside_NK, mask = (x_NK, None) if dropout is None else dropout.apply(x_NK)
        differs = ctx.needs_input_grad[2]
        weights_NC = products.gain if gain is None else gain
        branch = branch_for(x_NK)
        with branch.beside():
            raw_MNC = torch.bmm(inside_NK.expand(of.num, -1, -1), of.shrink.turned)
            coefficients_MNC = raw_MNC * weights_NC if differs else raw_MNC.mul_(weights_NC)
        y = F.linear(x_NK, of.weight, of.bias)
        branch.join()
        _by_map(y, of.num).baddbmm_(coefficients_MNC, of.expand.plain)
        ctx.save_for_backward(inside_NK, mask, weights_NC, coefficients_MNC, raw_MNC if differs else None)
        ctx.of, ctx.dropout = of, dropout
        return y.view(*x.shape[:-1], -1).chunk(of.num, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        inside_NK, mask, weights_NC, coefficients_MNC, raw_MNC = ctx.saved_tensors
        of: BoundStack = ctx.of
        shape, dy = dys[0].shape[:-1], torch.cat([dy.reshape(-1, dy.shape[-1]) for dy in dys], dim=1)
        dy_MNO = _by_map(dy, of.num)
        branch = branch_for(dy)
        with branch.beside():
            add_products(of.expand_gradient.plain, coefficients_MNC.mT, dy_MNO)
        back_MNC = torch.bmm(dy_MNO, of.expand.turned)
        gain_gradient = None if raw_MNC is None else (back_MNC * raw_MNC).sum(0)
        back_MNC.mul_(weights_NC)
        with branch.beside():
            add_products(of.shrink_gradient.plain, back_MNC.mT, inside_NK.expand(of.num, -1, -1))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(back_MNC[0], of.shrinks[0])
            for back_NC, shrink_CK in zip(back_MNC[1:], of.shrinks[1:], strict=True):
                dx.addmm_(back_NC, shrink_CK)
            if mask is not None:
                dx = ctx.dropout.back(dx, mask)
            dx.addmm_(dy, of.weight)
            dx = dx.view(*shape, -1)
        branch.join()
        return dx, None, gain_gradient, None, None, None


def _add_base(dx_NK: Tensor, dys_NO: Sequence[Tensor], of: BoundStack) -> Tensor:
    """Add what the weights give: map by map, since the gradients of the maps lie apart."""
    for dy_NO, weight in zip(dys_NO, of.weights, strict=True):
        dx_NK.addmm_(dy_NO, weight)
    return dx_NK


def _by_map(y: Tensor, num: int) -> Tensor:
    """[N, M * O] as [M, N, O], where it lies."""
    return y.view(len(y), num, -1).transpose(0, 1)
