"""Which attention kernel CUDA takes, and what each keeps.

    flash       half precision without a mask, from compute capability 8.0; keeps one float per row
    efficient   float32, any mask, and half precision on older GPUs; keeps one float per row
    math        what neither takes (head width over 256): keeps the whole matrix of scores

Both fused kernels take accumulators in float32 for the time of their backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
WIDEST = 256


def install(library: torch.library.Library, *, compute_capability: tuple[int, int] | None) -> None:
    flash = compute_capability is None or compute_capability >= (8, 0)

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.dim() != 4 or query.shape[-1] > WIDEST:
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
                query, key, value, attn_mask, dropout_p, is_causal, **options
            )[0]
        if flash and attn_mask is None and query.dtype in HALF:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if enable_gqa and key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)

    library.impl("scaled_dot_product_attention", attention, "AutogradCPU")


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    width = query.shape[-1]
    if width % 8:  # padded to a multiple of 8, and cut again
        query, key, value = (F.pad(each, (0, 8 - width % 8)) for each in (query, key, value))
        scale = scale if scale is not None else width**-0.5
    result: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return result[..., :width]


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    needs_backward = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    if mask is not None:
        mask = _as_bias(mask, query, key)
    result: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_backward, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the kernel reads it: added to the scores, its rows aligned to 16 elements."""
    if mask.dtype is torch.bool:
        bias = torch.zeros_like(mask, dtype=query.dtype)
        mask = bias.masked_fill_(mask.logical_not(), float("-inf"))
    length = mask.shape[-1]
    if length % 16:
        mask = F.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def backward_workspace(func: Any, args: Any) -> tuple[int, ...]:
    """Accumulators of a fused backward."""
    query = args[1]
    batch, heads, length, width = query.shape
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        rows, columns = _up(length, 128), _up(width, 32)
        return (batch * heads * rows * columns * 4, batch * heads * rows * 4)
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        sums = batch * heads * length * 4
        if query.dtype in HALF:
            return (sums, batch * heads * _up(length, 64) * width * 4)
        return (sums,)
    return ()


def _up(count: int, multiple: int) -> int:
    return (count + multiple - 1) // multiple * multiple
