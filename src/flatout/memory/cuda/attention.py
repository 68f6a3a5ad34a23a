"""Which attention kernel CUDA chooses, and what each keeps in memory.

    cudnn       half precision on Hopper and datacentre Blackwell, masks included, but no trained bias
    flash       half precision without a mask, from compute capability 8.0
    efficient   float32, any mask, and half precision on older GPUs
    math        what none of them supports: a mask whose last dimension is strided (a bias by head that was
                permuted, say), grouped heads in float32, keys of one head that all queries share without
                being declared as a group; keeps the matrix of scores, in float32

The fused kernels keep one float per row, and allocate float32 accumulators during their backward.
Measured on an H200 with torch 2.11 and cuDNN 9.19; the choice for other GPUs is PyTorch's documented order,
and the conditions on masks are those of its `sdp_utils`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.ground.units import round_up

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
WIDEST = 256
CUDNN_FIRST = ((9, 0), (10, 0), (10, 3))
CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
BACKWARDS = frozenset((CUDNN_BACKWARD, FLASH_BACKWARD, EFFICIENT_BACKWARD))


def install(library: torch.library.Library, *, compute_capability: tuple[int, int] | None) -> None:
    capability = compute_capability or (9, 0)

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
        grouped = enable_gqa and key.shape[1] != query.shape[1]
        half = query.dtype in HALF
        trained = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
        alike = grouped or query.shape[:2] == key.shape[:2] == value.shape[:2]
        fused = query.dim() == 4 and query.shape[-1] <= WIDEST and alike
        fused = fused and (half or not grouped) and _reads(attn_mask)
        if fused and half and capability in CUDNN_FIRST and query.shape[-1] % 8 == 0 and not trained:
            bias = None if attn_mask is None else _as_bias(attn_mask, query)
            needs = _needs_backward(query, key, value)
            results = aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, needs, dropout_p, is_causal, False, scale=scale
            )
        elif fused and half and capability >= (8, 0) and attn_mask is None:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        elif fused and not grouped:
            bias = None if attn_mask is None else _aligned_bias(attn_mask, query, key)
            needs = _needs_backward(query, key, value)
            results = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, needs, dropout_p, is_causal, scale=scale
            )
        else:
            options = {"scale": scale, "enable_gqa": enable_gqa}
            with _adding_in_place():
                results = aten._scaled_dot_product_attention_math(
                    query, key, value, attn_mask, dropout_p, is_causal, **options
                )
        return results[0]  # type: ignore[no-any-return]

    library.impl("scaled_dot_product_attention", attention, "AutogradCPU")


def install_natively(library: torch.library.Library) -> None:
    """Note only when plain attention runs, since it adds its mask in place; on CUDA PyTorch chooses."""
    plain = aten._scaled_dot_product_attention_math.default

    def attention(*args: Any, **kwargs: Any) -> Any:
        with _adding_in_place():
            return plain._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    library.impl("_scaled_dot_product_attention_math", attention, "AutogradCUDA")


_plain: list[None] = []  # one for each plain attention that is running


def adds_in_place() -> bool:
    """Return whether plain attention is running, which on real tensors adds its mask in place."""
    return bool(_plain)


@contextmanager
def _adding_in_place() -> Iterator[None]:
    _plain.append(None)
    try:
        yield
    finally:
        _plain.pop()


def _reads(mask: Tensor | None) -> bool:
    """Return whether fused kernels can read this mask: its rows must be contiguous."""
    return mask is None or mask.shape[-1] == 1 or mask.stride(-1) == 1


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


def _aligned_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the bias with aligned rows, as efficient attention reads it."""
    bias = _as_bias(mask, query)
    length = bias.shape[-1]
    if length % 8:
        bias = F.pad(bias, (0, 8 - length % 8))[..., :length]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _needs_backward(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """Return the mask as an additive bias."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.empty_like(mask, dtype=query.dtype)  # one kernel writes 0 or minus infinity


def backward_workspace(func: Any, args: Any) -> tuple[tuple[int, ...], ...]:
    """Return the accumulators of a fused backward: groups of blocks, one group after the other."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * length
    if func is CUDNN_BACKWARD:
        grouped = 0 if key.shape[1] == heads else 2 * batch * heads * key.shape[2] * width * 2
        return ((rows * width * 4 + rows * 4 + grouped,),)
    if func is FLASH_BACKWARD:
        rows = batch * heads * round_up(length, 128)
        return ((rows * round_up(width, 32) * 4, rows * 4),)
    product = rows * width * query.dtype.itemsize
    # one tile of the query's gradient for each block of rows, with a lock of four words
    tile = 64 if width <= 64 or query.dtype not in HALF else 128
    tiled = round_up(length, tile)
    blocks = batch * heads * (tiled * round_up(width, 64) + 4 * tiled // 64) * 4
    if query.dtype in HALF:  # the kernel multiplies gradient and result by itself, but not in float32
        return ((rows * 4, blocks),)
    return ((product, rows * 4, rows * 4), (rows * 4, blocks))
