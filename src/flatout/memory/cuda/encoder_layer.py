"""The fast path of nn.TransformerEncoderLayer and nn.MultiheadAttention in evaluation, as CUDA runs it.

Without gradients, and unless autocast is on, PyTorch runs a whole layer as one operation.  Inside it queries,
keys and values come from one product.  Without a mask it runs flash or efficient attention if it
can; otherwise it copies queries, keys and values apart, and keeps the matrix of scores and its softmax.
Sums are added in place.

This follows PyTorch's source; the path has not been measured.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.memory.cuda.attention import CUDNN_FIRST, HALF


def install(
    library: torch.library.Library, *, compute_capability: tuple[int, int] | None, key: str = "AutogradCPU"
) -> None:
    cudnn_first = (compute_capability or (9, 0)) in CUDNN_FIRST

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim: int,
        num_head: int,
        qkv_weight: Tensor,
        qkv_bias: Tensor,
        proj_weight: Tensor,
        proj_bias: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = True,
        average_attn_weights: bool = True,
        mask_type: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        fused = mask is None and not need_weights and not (cudnn_first and query.dtype in HALF)
        weights = query.new_empty(0)
        if fused:
            rows = _fused(query, num_head, qkv_weight, qkv_bias)
        else:
            rows, scores = _plain(query, num_head, qkv_weight)
            if need_weights:
                weights = scores.mean(1) if average_attn_weights else scores
        return F.linear(rows, proj_weight, proj_bias), weights

    def layer(src: Tensor, embed_dim: int, num_heads: int, *rest: Any) -> Tensor:
        qkv_weight, qkv_bias, proj_weight, proj_bias, *others = rest
        gelu, norm_first, eps, weight_1, bias_1, weight_2, bias_2, *feeds = others[:11]
        mask = others[11] if len(others) > 11 else None
        norms = ((weight_1, bias_1), (weight_2, bias_2))

        def normed(x: Tensor, which: int) -> Tensor:
            return F.layer_norm(x, (embed_dim,), *norms[which], eps)

        x = normed(src, 0) if norm_first else src
        own = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        x, _ = attention(x, x, x, embed_dim, num_heads, *own, mask=mask, need_weights=False)
        x = x.add_(src) if norm_first else normed(x.add_(src), 0)
        kept = x
        x = normed(x, 1) if norm_first else x
        hidden = F.linear(x, feeds[0], feeds[1])
        x = F.linear(F.gelu(hidden) if gelu else F.relu_(hidden), feeds[2], feeds[3])
        return x.add_(kept) if norm_first else normed(x.add_(kept), 1)

    library.impl("_native_multi_head_attention", attention, key)
    library.impl("_transformer_encoder_layer_fwd", layer, key)


def _fused(query: Tensor, num_heads: int, weight: Tensor, bias: Tensor) -> Tensor:
    batch, length, width = query.shape
    parts = F.linear(query, weight, bias).chunk(3, dim=-1)
    q, k, v = (part.view(batch, length, num_heads, -1).transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)


def _plain(query: Tensor, num_heads: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, width = query.shape
    joined = F.linear(query, weight)
    apart = query.new_empty((3, batch * num_heads, length, width // num_heads))
    del joined
    scores = torch.bmm(apart[0], apart[1].transpose(1, 2))
    shares = torch.empty_like(scores)  # softmax under the mask
    del scores
    rows = torch.bmm(shares, apart[2]).view(batch, num_heads, length, -1)
    return rows.transpose(1, 2).reshape(batch, length, width), shares.view(batch, num_heads, length, length)
