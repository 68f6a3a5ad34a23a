"""The plainest decoder there is: one row, one variant, its weights materialised, float32, no cache."""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.multiplex.decoder import Attention, Decoder, Norm, Projection
from flatout.multiplex.factors import Factors


def normalise(x: Tensor, norm: Norm) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.float()


def weights(product: Projection, factors: dict[str, Factors], variant: int | None, sign: int) -> Tensor:
    weight = product.weight.float()
    if variant is None or product.name not in factors:
        return weight
    return weight + factors[product.name].delta(variant, sign=sign)


def rotated(x: Tensor, attention: Attention) -> Tensor:
    assert attention.cos is not None and attention.sin is not None
    cos, sin = attention.cos[: x.shape[1]].float(), attention.sin[: x.shape[1]].float()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def logits_of(
    decoder: Decoder, ids: Tensor, factors: dict[str, Factors], variant: int | None, sign: int = 1
) -> Tensor:
    """Logits [tokens, vocabulary] of one row."""
    x = decoder.embedding[ids].float()
    tokens = len(ids)
    for block in decoder.blocks:
        attention = block.attention
        heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_width
        joined = normalise(x, block.attention_norm) @ weights(attention.qkv, factors, variant, sign).T
        if attention.qkv.bias is not None:
            joined = joined + attention.qkv.bias.float()
        q, k, v = joined.view(tokens, -1, width).transpose(0, 1).split([heads, kv_heads, kv_heads])
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = normalise(q, attention.q_norm), normalise(k, attention.k_norm)
        q, k = rotated(q, attention), rotated(k, attention)
        k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * attention.scale
        scores = scores.masked_fill(~torch.ones_like(scores).tril().bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(tokens, -1)
        x = x + mixed @ weights(attention.out, factors, variant, sign).T
        up = normalise(x, block.mlp_norm) @ weights(block.mlp.up, factors, variant, sign).T
        gate, value = up.chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * value) @ weights(block.mlp.down, factors, variant, sign).T
    return normalise(x, decoder.norm) @ decoder.head.weight.float().T
