"""Prefill: bias, correction, norms and rotation of queries, keys and values, into heads and into the cache.

One program per token and head of any kind; a plain causal attention kernel reads what it leaves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flatout.multiplex.kernels.attend import rotate
from flatout.multiplex.kernels.norm import factor


@triton.jit
def split_heads(
    qkv,  # [rows * tokens, (H + 2 K) E]
    bias,
    cos,
    sin,
    q_weight,
    k_weight,
    queries,  # [rows, H, tokens, E], written
    fresh_keys,  # [rows, K, tokens, E], written
    fresh_values,
    keys,  # the cache [slots, K, LENGTH, E], written
    values,
    slots,  # [rows]: which slot of the cache a row fills
    coefficients,  # [rows * tokens, RANK]
    expand,
    variant,  # [rows]
    norm_eps,
    num_tokens,
    length,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    RANK: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = E // 2
    WIDTH: tl.constexpr = (H + 2 * K) * E
    row = token // num_tokens
    here = token % num_tokens
    columns = head * E + tl.arange(0, HALF)
    x0 = tl.load(qkv + token * WIDTH + columns).to(tl.float32)
    x1 = tl.load(qkv + token * WIDTH + columns + HALF).to(tl.float32)
    if BIASED:
        x0 += tl.load(bias + columns).to(tl.float32)
        x1 += tl.load(bias + columns + HALF).to(tl.float32)
    if RANK > 0:
        which = tl.load(variant + row)
        for j in tl.static_range(RANK):
            c = tl.load(coefficients + token * RANK + j)
            start = (which * RANK + j) * WIDTH
            x0 += c * factor(expand, start, columns, columns < WIDTH)
            x1 += c * factor(expand, start, columns + HALF, columns < WIDTH)
    half = tl.arange(0, HALF)
    slot = tl.load(slots + row).to(tl.int64)
    if head < H + K:
        if NORMED:
            inverse = tl.rsqrt((tl.sum(x0 * x0, 0) + tl.sum(x1 * x1, 0)) / E + norm_eps)
            w0 = tl.where(head < H, tl.load(q_weight + half), tl.load(k_weight + half))
            w1 = tl.where(head < H, tl.load(q_weight + half + HALF), tl.load(k_weight + half + HALF))
            x0 = x0 * inverse * w0.to(tl.float32)
            x1 = x1 * inverse * w1.to(tl.float32)
        cosine = tl.load(cos + here * HALF + half).to(tl.float32)
        sine = tl.load(sin + here * HALF + half).to(tl.float32)
        x0, x1 = rotate(x0, x1, cosine, sine)
    kind = keys.dtype.element_ty
    x0, x1 = x0.to(kind), x1.to(kind)
    if head < H:
        at = queries + ((row * H + head) * num_tokens + here) * E + half
        tl.store(at, x0)
        tl.store(at + HALF, x1)
    else:
        is_key = head < H + K
        kv_head = tl.where(is_key, head - H, head - H - K)
        short = ((row * K + kv_head) * num_tokens + here) * E + half
        long = ((slot * K + kv_head) * length + here) * E + half
        if is_key:
            tl.store(fresh_keys + short, x0)
            tl.store(fresh_keys + short + HALF, x1)
            tl.store(keys + long, x0)
            tl.store(keys + long + HALF, x1)
        else:
            tl.store(fresh_values + short, x0)
            tl.store(fresh_values + short + HALF, x1)
            tl.store(values + long, x0)
            tl.store(values + long + HALF, x1)


@triton.jit
def shrink_rows(
    x,  # [rows, WIDTH]
    shrink,
    shrunk,  # [rows, RANK], written
    variant,
    sign,
    scale,
    num_tokens,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    own = row // num_tokens
    which = tl.load(variant + own)
    gain = scale * tl.load(sign + own)
    values = tl.load(x + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(RANK):
        b = factor(shrink, (which * RANK + j) * WIDTH, columns, inside)
        tl.store(shrunk + row * RANK + j, tl.sum(values * b, 0) * gain)
