"""Residual add + RMS norm: the kernel before every product that reads the residual stream.

It carries two halves of the correction.  The product before (attention's output or the MLP's) left its
coefficients in `coefficients`, as partial sums; their expansion is added together with its result.  The product
after will need x . shrink; the row is in registers here, and normalising is linear in x, so one more reduction
beside the norm's own gives it.  Factors are loaded before the first reduction: loads do not pass one.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONCE = tl.constexpr(
    "evict_first"
)  # data that nothing reads again: let it make room for the products' operands


@triton.jit
def factor(pointer, start, columns, inside):
    """Float32 values of a factor's `columns` past element `start`.

    int8 is not converted: the integer is added into the mantissa of a constant, at a quarter of the cost.
    """
    value = tl.load(pointer + start + columns, mask=inside, other=0)
    if pointer.dtype.element_ty == tl.int8:
        return (value.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    return value.to(tl.float32)


@triton.jit
def add_norm(
    residual,  # [rows, WIDTH], updated in place
    branch,  # [rows, WIDTH]: what the last product gave; read if FROM_BRANCH
    tokens,  # [rows] ids and
    embedding,  # [vocabulary, WIDTH]: read otherwise
    embedding_scale,
    weight,
    normed,  # [rows, WIDTH], written
    coefficients,  # [rows, RANK_IN, PARTS]: partial sums of the last product's coefficients
    expand,  # [variants, RANK_IN, WIDTH] of the last product
    shrink,  # [variants, RANK_OUT, WIDTH] of the next one
    shrunk,  # [rows, RANK_OUT], written
    variant,  # [rows / TOKENS]
    sign,
    scale,  # of the next product
    eps,
    num_tokens,  # rows of this call that belong to one row of the tables
    GROUP_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK_IN: tl.constexpr,
    RANK_OUT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    FROM_BRANCH: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = rows[:, None] * WIDTH + columns[None, :]
    own = first // num_tokens
    which = own // GROUP_ROWS if GROUP_ROWS > 0 else tl.load(variant + own)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    # Factors first: they wait for nothing, and no load passes a reduction.
    if RANK_OUT == 1:
        b0 = factor(shrink, which * WIDTH, columns, inside)
    if RANK_IN == 1:
        a0 = factor(expand, which * WIDTH, columns, inside)
    if FROM_BRANCH:
        x = tl.load(residual + at, mask=inside[None, :], other=0.0).to(tl.float32)
        x += tl.load(branch + at, mask=inside[None, :], other=0.0, eviction_policy=ONCE).to(tl.float32)
        part = tl.arange(0, BLOCK_PARTS)
        if RANK_IN == 1:
            c = tl.load(
                coefficients + rows[:, None] * PARTS + part[None, :], mask=part[None, :] < PARTS, other=0.0
            )
            x += tl.sum(c, 1)[:, None] * a0[None, :]
        elif RANK_IN > 1:
            CHUNK_IN: tl.constexpr = 4 if RANK_IN % 4 == 0 else 1
            for j in tl.static_range(0, RANK_IN, CHUNK_IN):
                ranks = j + tl.arange(0, CHUNK_IN)
                a = factor(
                    expand, (which * RANK_IN + ranks[:, None]) * WIDTH, columns[None, :], inside[None, :]
                )
                c_at = (rows[:, None, None] * RANK_IN + ranks[None, :, None]) * PARTS + part[None, None, :]
                c = tl.sum(tl.load(coefficients + c_at, mask=part[None, None, :] < PARTS, other=0.0), 2)
                x += tl.sum(c[:, :, None] * a[None, :, :], 1)
    else:
        token = tl.load(tokens + rows).to(tl.int64)
        x = tl.load(embedding + token[:, None] * WIDTH + columns[None, :], mask=inside[None, :], other=0.0)
        x = x.to(tl.float32)
        if SCALED:
            x = x * embedding_scale
    rounded = x.to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=inside[None, :])
    x = rounded.to(tl.float32)
    xw = x * w[None, :]
    squares = tl.sum(x * x, 1)
    inverse = tl.rsqrt(squares / WIDTH + eps)
    tl.store(normed + at, (xw * inverse[:, None]).to(normed.dtype.element_ty), mask=inside[None, :])
    if RANK_OUT > 0:
        # normalising is linear in x: norm(x) . b = (x * w) . b / rms(x)
        gain = inverse * (scale * tl.load(sign + own))
        if RANK_OUT == 1:
            tl.store(shrunk + rows, tl.sum(xw * b0[None, :], 1) * gain)
        else:
            CHUNK: tl.constexpr = 4 if RANK_OUT % 4 == 0 else 1
            for j in tl.static_range(0, RANK_OUT, CHUNK):
                ranks = j + tl.arange(0, CHUNK)
                start = (which * RANK_OUT + ranks[:, None]) * WIDTH
                b = factor(shrink, start, columns[None, :], inside[None, :])
                dots = tl.sum(xw[:, None, :] * b[None, :, :], 2)
                tl.store(shrunk + rows[:, None] * RANK_OUT + ranks[None, :], dots * gain[:, None])
