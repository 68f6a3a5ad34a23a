"""Residual add + RMS norm: the kernel before every product that reads the residual stream.

It carries two halves of the correction.  The product before (attention's output or the MLP's) left its
coefficients in `coefficients`, as partial sums; their expansion is added together with its result.  The
product after will need x . shrink; the row is in registers here, and normalising is linear in x, so one more
reduction beside the norm's own gives it.  Factors are loaded before the first reduction: loads do not pass
one.

A vector that a variant adds after a layer (steering) is added here too, at the norm that reads the layer.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONCE = tl.constexpr("evict_first")  # nothing reads it again: let it make room for the products' operands


@triton.jit
def add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    """Add four sums in one pass over the threads."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def stored(pointer, start, columns, inside):
    """Load a factor's `columns` past element `start` as they lie in memory: four int8 to a register."""
    return tl.load(pointer + start + columns, mask=inside, other=0)


@triton.jit
def opened(value, CONVERT: tl.constexpr = False):
    """Return float32 values of what `stored` loaded.

    Without CONVERT, int8 is added into the mantissa of a constant: three cheap instructions instead of one
    of the converter.
    """
    if value.dtype == tl.int8 and not CONVERT:
        return (value.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    return value.to(tl.float32)


@triton.jit
def factor(pointer, start, columns, inside, CONVERT: tl.constexpr = False):
    """Return float32 values of a factor's `columns` past element `start`."""
    return opened(stored(pointer, start, columns, inside), CONVERT)


@triton.jit
def four(pointer, start, columns, inside, WIDTH: tl.constexpr):
    """Load the factors of four ranks, as stored."""
    s0 = stored(pointer, start, columns, inside)
    s1 = stored(pointer, start + WIDTH, columns, inside)
    s2 = stored(pointer, start + 2 * WIDTH, columns, inside)
    s3 = stored(pointer, start + 3 * WIDTH, columns, inside)
    return s0, s1, s2, s3


@triton.jit
def total(at, part, PARTS: tl.constexpr, SPAN: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """Return partial sums added up until SPAN of them are left, few enough for the threads of a warp."""
    found = tl.load(at, mask=part < PARTS, other=0.0)
    for start in tl.static_range(SPAN, BLOCK_PARTS, SPAN):
        found += tl.load(at + start, mask=part + start < PARTS, other=0.0)
    return found


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
    vectors,  # [variants, WIDTH]: what each variant adds to the residual stream; read if STEERED
    variant,  # [rows / TOKENS]
    sign,
    scale,  # of the next product
    eps,
    num_tokens,  # rows of this call that belong to one row of the tables
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK_IN: tl.constexpr,
    RANK_OUT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    FROM_BRANCH: tl.constexpr,
    SCALED: tl.constexpr,
    STEERED: tl.constexpr,
    ROWS: tl.constexpr,
    CONVERT: tl.constexpr,
    AHEAD: tl.constexpr,  # the factors of the next four ranks are asked for before a reduction
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = rows[:, None] * WIDTH + columns[None, :]
    own = first // num_tokens
    which = tl.load(variant + own)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    # Factors first: they wait for nothing, and no load passes a reduction.  From rank 4 on they
    # stay as stored until then; this was measured with two rows a program.
    if RANK_OUT == 1:
        b0 = factor(shrink, which * WIDTH, columns, inside, CONVERT)
    if RANK_IN == 1:
        a0 = factor(expand, which * WIDTH, columns, inside, CONVERT)
    EARLY: tl.constexpr = (RANK_OUT == 4 or (AHEAD and RANK_OUT % 4 == 0)) and ROWS == 2
    if EARLY:
        s0, s1, s2, s3 = four(shrink, which * RANK_OUT * WIDTH, columns, inside, WIDTH)
    if FROM_BRANCH:
        x = tl.load(residual + at, mask=inside[None, :], other=0.0).to(tl.float32)
        x += tl.load(branch + at, mask=inside[None, :], other=0.0, eviction_policy=ONCE).to(tl.float32)
        SPAN: tl.constexpr = 16 if BLOCK_PARTS > 16 and RANK_IN > 1 else BLOCK_PARTS
        part = tl.arange(0, SPAN)[None, :]
        c_at = coefficients + rows[:, None] * (RANK_IN * PARTS) + part
        if RANK_IN == 1:
            x += tl.sum(total(c_at, part, PARTS, SPAN, BLOCK_PARTS), 1)[:, None] * a0[None, :]
        elif RANK_IN % 4 == 0:
            for j in tl.static_range(0, RANK_IN, 4):
                if j == 0 or not AHEAD:
                    a0, a1, a2, a3 = four(expand, (which * RANK_IN + j) * WIDTH, columns, inside, WIDTH)
                c0 = total(c_at + j * PARTS, part, PARTS, SPAN, BLOCK_PARTS)
                c1 = total(c_at + (j + 1) * PARTS, part, PARTS, SPAN, BLOCK_PARTS)
                c2 = total(c_at + (j + 2) * PARTS, part, PARTS, SPAN, BLOCK_PARTS)
                c3 = total(c_at + (j + 3) * PARTS, part, PARTS, SPAN, BLOCK_PARTS)
                if AHEAD and j + 4 < RANK_IN:
                    n0, n1, n2, n3 = four(expand, (which * RANK_IN + j + 4) * WIDTH, columns, inside, WIDTH)
                if ROWS == 1:  # one reduction of four over a single row ran 20 times slower
                    c0, c1, c2, c3 = tl.sum(c0, 1), tl.sum(c1, 1), tl.sum(c2, 1), tl.sum(c3, 1)
                else:
                    c0, c1, c2, c3 = tl.reduce((c0, c1, c2, c3), 1, add_four)
                x += c0[:, None] * opened(a0, CONVERT)[None, :] + c1[:, None] * opened(a1, CONVERT)[None, :]
                x += c2[:, None] * opened(a2, CONVERT)[None, :] + c3[:, None] * opened(a3, CONVERT)[None, :]
                if AHEAD and j + 4 < RANK_IN:
                    a0, a1, a2, a3 = n0, n1, n2, n3
        else:
            for j in tl.static_range(RANK_IN):
                a = factor(expand, (which * RANK_IN + j) * WIDTH, columns, inside, CONVERT)
                x += tl.sum(total(c_at + j * PARTS, part, PARTS, SPAN, BLOCK_PARTS), 1)[:, None] * a[None, :]
    else:
        token = tl.load(tokens + rows).to(tl.int64)
        x = tl.load(embedding + token[:, None] * WIDTH + columns[None, :], mask=inside[None, :], other=0.0)
        x = x.to(tl.float32)
        if SCALED:
            x = x * embedding_scale
    if STEERED:
        gain = tl.load(sign + rows // num_tokens)[:, None]
        vector = tl.load(vectors + which * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        # Rounded where a layer ends; chosen, not multiplied by 0: a plain row keeps its bits.
        steered = x.to(residual.dtype.element_ty).to(tl.float32) + gain * vector[None, :]
        x = tl.where(gain != 0, steered, x)
    rounded = x.to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=inside[None, :])
    x = rounded.to(tl.float32)
    xw = x * w[None, :]
    squares = tl.sum(x * x, 1)
    inverse = tl.rsqrt(squares / WIDTH + eps)
    tl.store(normed + at, (xw * inverse[:, None]).to(normed.dtype.element_ty), mask=inside[None, :])
    if RANK_OUT > 0:
        # normalising is linear in x: norm(x) . b = (x * w) . b / rms(x)
        gain = inverse * (scale * tl.load(sign + rows // num_tokens))
        to = shrunk + rows * RANK_OUT
        if RANK_OUT == 1:
            tl.store(to, tl.sum(xw * b0[None, :], 1) * gain)
        elif RANK_OUT % 4 == 0:
            for j in tl.static_range(0, RANK_OUT, 4):
                if not EARLY:
                    s0, s1, s2, s3 = four(shrink, (which * RANK_OUT + j) * WIDTH, columns, inside, WIDTH)
                p0, p1 = xw * opened(s0, CONVERT)[None, :], xw * opened(s1, CONVERT)[None, :]
                p2, p3 = xw * opened(s2, CONVERT)[None, :], xw * opened(s3, CONVERT)[None, :]
                if EARLY and j + 4 < RANK_OUT:
                    s0, s1, s2, s3 = four(shrink, (which * RANK_OUT + j + 4) * WIDTH, columns, inside, WIDTH)
                p0, p1, p2, p3 = tl.reduce((p0, p1, p2, p3), 1, add_four)
                tl.store(to + j, p0 * gain)
                tl.store(to + j + 1, p1 * gain)
                tl.store(to + j + 2, p2 * gain)
                tl.store(to + j + 3, p3 * gain)
        else:
            for j in tl.static_range(RANK_OUT):
                b = factor(shrink, (which * RANK_OUT + j) * WIDTH, columns, inside, CONVERT)
                tl.store(to + j, tl.sum(xw * b[None, :], 1) * gain)
