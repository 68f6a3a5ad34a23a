"""One decode step of attention: bias, rotation, cache write, attention and both halves of the correction.

One program owns one row and one key-value head with its H/K query heads.  The queries of a group stand at the
same position, so their scores are one small matrix product per tile of keys; keys and values are read once.
Rotation pairs column i of a head with column i + E/2, so queries and keys are held as two halves, and a score
is the sum of two products.  The row's own key and value never take the way through memory: they start the
running softmax.  The coefficients of the output product are left as one partial sum per key-value head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flatout.multiplex.kernels.norm import ONCE, add_four, factor


@triton.jit
def rotate(first, second, cosine, sine):
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def attend(
    qkv,  # [rows, (H + 2 K) E]
    bias,
    cos,  # [positions, E / 2]
    sin,
    q_weight,  # norms of Qwen 3, [E]
    k_weight,
    keys,  # [slots, K, LENGTH, E]
    values,
    out,  # [rows, H E]
    position,  # [rows]
    coefficients,  # [rows, RANK] of the qkv product
    expand,  # [variants, RANK, (H + 2 K) E]
    shrink,  # [variants, RANK, H E] of the output product
    shrunk,  # [rows, RANK, K], written
    variant,
    sign,
    scale_out,  # of the output product's factors
    score_scale,
    norm_eps,
    length,  # positions of a slot
    window,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,  # H / K, up to a power of two
    COPIES: tl.constexpr,  # of each query, so that a matrix product takes them: at least 16 rows
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    CONVERT: tl.constexpr,
    ALONG: tl.constexpr,  # neighbouring programs have neighbouring heads, not neighbouring rows
):
    if ALONG:
        row = (tl.program_id(0) // K).to(tl.int64)
        head = tl.program_id(0) % K
    else:
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
    HALF: tl.constexpr = E // 2
    PER: tl.constexpr = H // K
    WIDTH: tl.constexpr = (H + 2 * K) * E
    half = tl.arange(0, HALF)
    full = tl.arange(0, E)
    query = tl.arange(0, GROUP)
    live = query < PER
    here = tl.load(position + row).to(tl.int32)
    which = tl.load(variant + row)
    slot = (row * K + head) * length * E

    q_at = (head * PER + query[:, None]) * E + half[None, :]
    k_at = (H + head) * E + half
    v_at = (H + K + head) * E + full
    base = qkv + row * WIDTH
    q0 = tl.load(base + q_at, mask=live[:, None], other=0.0).to(tl.float32)
    q1 = tl.load(base + q_at + HALF, mask=live[:, None], other=0.0).to(tl.float32)
    k0 = tl.load(base + k_at).to(tl.float32)
    k1 = tl.load(base + k_at + HALF).to(tl.float32)
    v = tl.load(base + v_at).to(tl.float32)
    if BIASED:
        q0 += tl.load(bias + q_at, mask=live[:, None], other=0.0).to(tl.float32)
        q1 += tl.load(bias + q_at + HALF, mask=live[:, None], other=0.0).to(tl.float32)
        k0 += tl.load(bias + k_at).to(tl.float32)
        k1 += tl.load(bias + k_at + HALF).to(tl.float32)
        v += tl.load(bias + v_at).to(tl.float32)
    for j in tl.static_range(RANK):
        c = tl.load(coefficients + row * RANK + j)
        start = (which * RANK + j) * WIDTH
        q0 += c * factor(expand, start, q_at, live[:, None], CONVERT)
        q1 += c * factor(expand, start, q_at + HALF, live[:, None], CONVERT)
        k0 += c * factor(expand, start, k_at, half < HALF, CONVERT)
        k1 += c * factor(expand, start, k_at + HALF, half < HALF, CONVERT)
        v += c * factor(expand, start, v_at, full < E, CONVERT)
    kind = keys.dtype.element_ty
    if NORMED:
        q_inverse = tl.rsqrt((tl.sum(q0 * q0, 1) + tl.sum(q1 * q1, 1)) / E + norm_eps)[:, None]
        k_inverse = tl.rsqrt((tl.sum(k0 * k0, 0) + tl.sum(k1 * k1, 0)) / E + norm_eps)
        q0 = q0 * q_inverse * tl.load(q_weight + half).to(tl.float32)[None, :]
        q1 = q1 * q_inverse * tl.load(q_weight + half + HALF).to(tl.float32)[None, :]
        k0 = k0 * k_inverse * tl.load(k_weight + half).to(tl.float32)
        k1 = k1 * k_inverse * tl.load(k_weight + half + HALF).to(tl.float32)
    cosine = tl.load(cos + here * HALF + half).to(tl.float32)
    sine = tl.load(sin + here * HALF + half).to(tl.float32)
    q0, q1 = rotate(q0, q1, cosine[None, :], sine[None, :])
    k0, k1 = rotate(k0, k1, cosine, sine)

    k0, k1, v = k0.to(kind), k1.to(kind), v.to(kind)
    tl.store(keys + slot + here * E + half, k0)
    tl.store(keys + slot + here * E + half + HALF, k1)
    tl.store(values + slot + here * E + full, v)

    LOG2E: tl.constexpr = 1.4426950408889634
    ROWS: tl.constexpr = GROUP * COPIES
    q0 = (q0 * (score_scale * LOG2E)).to(kind)
    q1 = (q1 * (score_scale * LOG2E)).to(kind)
    q0 = tl.reshape(tl.broadcast_to(q0[:, None, :], (GROUP, COPIES, HALF)), (ROWS, HALF))
    q1 = tl.reshape(tl.broadcast_to(q1[:, None, :], (GROUP, COPIES, HALF)), (ROWS, HALF))
    top = tl.sum(q0.to(tl.float32) * k0.to(tl.float32)[None, :], 1)
    top += tl.sum(q1.to(tl.float32) * k1.to(tl.float32)[None, :], 1)
    total = tl.full((ROWS,), 1.0, tl.float32)
    mixed = tl.zeros((ROWS, E), tl.float32) + v.to(tl.float32)[None, :]
    tile = tl.arange(0, TILE)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(here - window + 1, 0) // TILE * TILE
    for start in tl.range(begin, here, TILE, num_stages=STAGES):
        p = start + tile
        seen = p < here
        if WINDOWED:
            seen = seen & (p > here - window)
        key_at = keys + slot + p[None, :] * E + half[:, None]
        t0 = tl.load(key_at, mask=seen[None, :], other=0.0, eviction_policy=ONCE)
        t1 = tl.load(key_at + HALF, mask=seen[None, :], other=0.0, eviction_policy=ONCE)
        u = tl.load(
            values + slot + p[:, None] * E + full[None, :],
            mask=seen[:, None],
            other=0.0,
            eviction_policy=ONCE,
        )
        scores = tl.dot(q0, t0, input_precision=PRECISION)
        scores = tl.dot(q1, t1, scores, input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - higher)
        shares = tl.exp2(scores - higher[:, None])
        total = total * fade + tl.sum(shares, 1)
        mixed = tl.dot(shares.to(kind), u, mixed * fade[:, None], input_precision=PRECISION)
        top = higher
    mixed = tl.max(tl.reshape(mixed / total[:, None], (GROUP, COPIES, E)), 1).to(out.dtype.element_ty)
    o_at = (head * PER + query[:, None]) * E + full[None, :]
    tl.store(out + row * H * E + o_at, mixed, mask=live[:, None])
    if RANK > 0:
        gain = scale_out * tl.load(sign + row)
        o = mixed.to(tl.float32)
        to = shrunk + row * RANK * K + head
        if RANK % 4 == 0:
            for j in tl.static_range(0, RANK, 4):
                start = (which * RANK + j) * H * E
                p0 = o * factor(shrink, start, o_at, live[:, None], CONVERT)
                p1 = o * factor(shrink, start + H * E, o_at, live[:, None], CONVERT)
                p2 = o * factor(shrink, start + 2 * H * E, o_at, live[:, None], CONVERT)
                p3 = o * factor(shrink, start + 3 * H * E, o_at, live[:, None], CONVERT)
                p0, p1, p2, p3 = tl.reduce((p0, p1, p2, p3), 1, add_four)
                p0, p1, p2, p3 = tl.reduce((p0, p1, p2, p3), 0, add_four)
                tl.store(to + j * K, p0 * gain)
                tl.store(to + (j + 1) * K, p1 * gain)
                tl.store(to + (j + 2) * K, p2 * gain)
                tl.store(to + (j + 3) * K, p3 * gain)
        else:
            for j in tl.static_range(RANK):
                b = factor(shrink, (which * RANK + j) * H * E, o_at, live[:, None], CONVERT)
                tl.store(to + j * K, tl.sum(tl.sum(o * b, 1), 0) * gain)
