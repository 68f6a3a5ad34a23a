"""One linear map, another low-rank variant of it for each row of the batch.

    y = x W^T + b + gain * (x . shrink[v]) expand[v]        v, gain: of the row

The first product is the plain model's and runs as it would alone; the correction reads the variants' factors
and touches y once more.  At decode sizes (a token a row) it is bound by the bytes of factors and y, so on a
GPU two small Triton kernels read each once; for longer inputs the tokens of a variant share its factors, and
batched products (`ranges.Batched`) are the better shape: over the variants where rows lie in groups, else
over the rows, each with a copy of its factors.  A row of gain 0 is the plain model's row, unchanged.

The operator is registered with torch (`flatout::multiplex_linear`) with a shape rule and a derivative, so
that compile and CUDA graphs see one node.  Its derivative to x is itself, the factors in each other's place.

Shapes: R rows, B batches of n tokens (a group of rows, or a row), K rank, I and O widths.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.ground.errors import BadInput
from flatout.multiplex.kernels import HAS_TRITON
from flatout.multiplex.products.ranges import Batched, FactorViews

DECODE_TOKENS = 16  # tokens a row up to which the kernels that work token by token are taken: assumed
INT8_SHIFT = 32.0  # in float16 an int8 factor is divided by this, exactly, so that dot products stay in range

_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor shrink, Tensor expand, Tensor index, Tensor gain,"
    " int group_size) -> Tensor"
)


def linear(
    x: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    shrink: Tensor,
    expand: Tensor,
    index: Tensor,
    gain: Tensor,
    group_size: int = 0,
) -> Tensor:
    """Apply the operator, with its sizes checked and autocast heeded as `nn.Linear` heeds it.

    x is [rows, ..., in].  Row i adds gain[i] times the product of the factors of variant index[i].  With
    `group_size` the rows of variant v are [v * group_size, (v + 1) * group_size).
    """
    rows = x.shape[0]
    if rows != index.shape[0]:
        raise BadInput(
            f"an input has {rows} rows, and the table of variants {index.shape[0]}",
            hint="the first dimension of every input must be the rows of the batch",
        )
    if group_size and (rows % group_size or rows > group_size * shrink.shape[0]):
        raise BadInput(
            f"{rows} rows cannot be cut into groups of {group_size} for {shrink.shape[0]} variants",
            hint="give group_size=0 for rows in any order",
        )
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    result: Tensor = multiplex_linear(x, weight, bias, shrink, expand, index, gain, group_size)
    return result


@torch.library.custom_op("flatout::multiplex_linear", mutates_args=(), schema=_SCHEMA)
def multiplex_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shrink: Tensor,
    expand: Tensor,
    index: Tensor,
    gain: Tensor,
    group_size: int,
) -> Tensor:
    """Compute the plain product, and the correction in the shape that suits device and length."""
    y = F.linear(x, weight, bias).contiguous()
    if not y.numel():
        return y
    tokens = x.numel() // (x.shape[0] * x.shape[-1])
    if x.is_cuda and HAS_TRITON and tokens <= DECODE_TOKENS and x.dtype != torch.float64:
        from flatout.multiplex.kernels.linear import correct

        correct(y, x.contiguous(), shrink=shrink, expand=expand, index=index, gain=gain)
    else:
        correct_rows(y, x, shrink=shrink, expand=expand, index=index, gain=gain, group_size=group_size)
    return y


@multiplex_linear.register_fake
def _shape(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def correct_rows(
    y: Tensor, x: Tensor, *, shrink: Tensor, expand: Tensor, index: Tensor, gain: Tensor, group_size: int
) -> None:
    """Add every row's correction to y [rows, ..., out] in place, by batched products."""
    own = gain * INT8_SHIFT if _is_shifted(expand, x.dtype) else gain
    coefficients_BnK = _coefficients(x, shrink, index=index, gain=own, group_size=group_size)
    views = _of_batches(expand, index=index, num_rows=len(x), group_size=group_size, dtype=x.dtype)
    if not group_size and (gain.is_cuda or not gain.all()):
        # Every row names a variant, an unperturbed one too; that variant's numbers must not reach it.
        views.plain.masked_fill_(gain.eq(0)[:, None, None], 0)
    products = _batched(views)
    products.add_up(products.split(y.view(-1, y.shape[-1])), coefficients_BnK, views)


def _coefficients(x: Tensor, factor: Tensor, *, index: Tensor, gain: Tensor, group_size: int) -> Tensor:
    """Return gain * (x . factor[v]) of every token, [B, n, K]."""
    views = _of_batches(factor, index=index, num_rows=len(x), group_size=group_size, dtype=x.dtype)
    products = _batched(views)
    dots_BnK = products.down(products.split(x.reshape(-1, x.shape[-1])), views)
    own_R11 = (gain * INT8_SHIFT if _is_shifted(factor, x.dtype) else gain)[:, None, None]
    dots_BnK.view(len(x), -1, dots_BnK.shape[2]).mul_(own_R11).masked_fill_(own_R11.eq(0), 0)
    return dots_BnK


def _batched(views: FactorViews) -> Batched:
    return Batched(first=0, last=len(views.plain), alpha=1.0, scales=None)


def _of_batches(
    factor: Tensor, *, index: Tensor, num_rows: int, group_size: int, dtype: torch.dtype
) -> FactorViews:
    """Return the factor of each batch of a batched product: a view if rows lie in groups, else copies."""
    chosen = (factor[: num_rows // group_size] if group_size else factor[index]).to(dtype)
    plain = chosen / INT8_SHIFT if _is_shifted(factor, dtype) else chosen
    return FactorViews(plain, plain.mT)


def _is_shifted(factor: Tensor, dtype: torch.dtype) -> bool:
    return factor.dtype == torch.int8 and dtype == torch.float16


def _factor_gradient(
    factor: Tensor, *, coefficients_BnK: Tensor, inside: Tensor, index: Tensor, group_size: int
) -> Tensor:
    """Sum coefficient times inside over the tokens of each variant: the derivative of either factor."""
    of_batch_BKW = torch.bmm(coefficients_BnK.mT, inside.reshape(len(coefficients_BnK), -1, inside.shape[-1]))
    wide = torch.promote_types(of_batch_BKW.dtype, torch.float32)
    gradient = torch.zeros(factor.shape, dtype=wide, device=factor.device)
    if group_size:
        gradient[: len(of_batch_BKW)] = of_batch_BKW.to(wide)
    else:
        gradient.index_add_(0, index, of_batch_BKW.to(wide))
    return gradient.to(factor.dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, shrink, expand, index, gain, group_size = inputs
    _, for_weight, _, for_shrink, for_expand, *_ = ctx.needs_input_grad
    # Frozen weights and noise need no x: a backward to x alone keeps no activation alive.
    keep_x = for_weight or for_shrink or for_expand
    ctx.save_for_backward(x if keep_x else None, weight, shrink, expand, index, gain)
    ctx.group_size = group_size


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, shrink, expand, index, gain = ctx.saved_tensors
    for_x, for_weight, for_bias, for_shrink, for_expand, *_ = ctx.needs_input_grad
    rows = {"index": index, "group_size": ctx.group_size}
    to_x = to_weight = to_bias = to_shrink = to_expand = None
    if for_x:
        to_x = multiplex_linear(
            gradient, weight.mT, None, expand, shrink, index, gain, group_size=ctx.group_size
        )
    if for_weight:
        to_weight = gradient.reshape(-1, gradient.shape[-1]).mT @ x.reshape(-1, x.shape[-1])
    if for_bias:
        to_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
    if for_shrink:
        outer = _coefficients(gradient, expand, gain=gain, **rows)
        to_shrink = _factor_gradient(shrink, coefficients_BnK=outer, inside=x, **rows)
    if for_expand:
        inner = _coefficients(x, shrink, gain=gain, **rows)
        to_expand = _factor_gradient(expand, coefficients_BnK=inner, inside=gradient, **rows)
    return to_x, to_weight, to_bias, to_shrink, to_expand, None, None, None


multiplex_linear.register_autograd(_backward, setup_context=_remember)
