"""activation(gate) * up between the MLP's two products, with the correction of both.

The down product's coefficients are left as one partial sum per block of columns: adding them up in the next
kernel keeps the result the same from run to run, which atomic additions would not.  At higher ranks tensor
cores can compute them, exactly: by then the rows are rounded to the model's dtype, and int8 is exact in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flatout.multiplex.kernels.norm import ONCE, add_four, factor, opened, stored


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == "silu":
        return x / (1 + tl.exp(-x))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1 + tl.exp(-2 * inner))


@triton.jit
def both(pointer, start, columns, inside, WIDTH: tl.constexpr):
    """Load a rank's factor of gate and of up, as stored."""
    return stored(pointer, start, columns, inside), stored(pointer, start + WIDTH, columns, inside)


@triton.jit
def gate_up(
    joined,  # [rows, 2 WIDTH]
    out,  # [rows, WIDTH], written
    coefficients,  # [rows, RANK] of the up product
    expand,  # [variants, RANK, 2 WIDTH]
    shrink,  # [variants, RANK, WIDTH] of the down product
    shrunk,  # [rows, RANK, parts], written
    variant,
    sign,
    scale_out,
    num_tokens,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,  # RANK up to a power of two of at least 16: coefficients by a matrix product; or 0
    CONVERT: tl.constexpr,
    ALONG: tl.constexpr,  # neighbouring programs have neighbouring columns, not neighbouring rows
    AHEAD: tl.constexpr,  # factors are asked for four ranks ahead of their use
):
    if ALONG:
        first = (tl.program_id(0) // PARTS).to(tl.int64) * ROWS
        part = tl.program_id(0) % PARTS
    else:
        first = tl.program_id(0).to(tl.int64) * ROWS
        part = tl.program_id(1)
    rows = first + tl.arange(0, ROWS)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    own = first // num_tokens
    which = tl.load(variant + own)
    if RANK == 1:
        b0 = factor(shrink, which * WIDTH, columns, inside, CONVERT)
        a0 = factor(expand, which * 2 * WIDTH, columns, inside, CONVERT)
        a1 = factor(expand, which * 2 * WIDTH, columns + WIDTH, inside, CONVERT)
    if AHEAD:
        start = which * RANK * 2 * WIDTH
        n0, m0 = both(expand, start, columns, inside, WIDTH)
        n1, m1 = both(expand, start + 2 * WIDTH, columns, inside, WIDTH)
        n2, m2 = both(expand, start + 4 * WIDTH, columns, inside, WIDTH)
        n3, m3 = both(expand, start + 6 * WIDTH, columns, inside, WIDTH)
    if DOT:
        rank = tl.arange(0, DOT)
        b_at = shrink + (which * RANK + rank[:, None]) * WIDTH + columns[None, :]
        b = tl.load(b_at, mask=inside[None, :] & (rank[:, None] < RANK), other=0)
    at = rows[:, None] * (2 * WIDTH) + columns[None, :]
    g = tl.load(joined + at, mask=inside[None, :], other=0.0, eviction_policy=ONCE).to(tl.float32)
    u = tl.load(joined + at + WIDTH, mask=inside[None, :], other=0.0, eviction_policy=ONCE).to(tl.float32)
    for j in tl.static_range(RANK):
        c = tl.load(coefficients + rows * RANK + j)
        if RANK == 1:
            g += c[:, None] * a0[None, :]
            u += c[:, None] * a1[None, :]
        elif AHEAD:
            if j % 4 == 0:
                a0, a1, a2, a3 = n0, n1, n2, n3
                b0, b1, b2, b3 = m0, m1, m2, m3
                if j + 4 < RANK:
                    start = (which * RANK + j + 4) * 2 * WIDTH
                    n0, m0 = both(expand, start, columns, inside, WIDTH)
                    n1, m1 = both(expand, start + 2 * WIDTH, columns, inside, WIDTH)
                    n2, m2 = both(expand, start + 4 * WIDTH, columns, inside, WIDTH)
                    n3, m3 = both(expand, start + 6 * WIDTH, columns, inside, WIDTH)
            a = a0 if j % 4 == 0 else a1 if j % 4 == 1 else a2 if j % 4 == 2 else a3
            d = b0 if j % 4 == 0 else b1 if j % 4 == 1 else b2 if j % 4 == 2 else b3
            g += c[:, None] * opened(a, CONVERT)[None, :]
            u += c[:, None] * opened(d, CONVERT)[None, :]
        else:
            start = (which * RANK + j) * 2 * WIDTH
            g += c[:, None] * factor(expand, start, columns, inside, CONVERT)[None, :]
            u += c[:, None] * factor(expand, start, columns + WIDTH, inside, CONVERT)[None, :]
    h = (activate(g, KIND) * u).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * WIDTH + columns[None, :], h, mask=inside[None, :])
    if RANK > 0:
        gain = scale_out * tl.load(sign + rows // num_tokens)
        h = tl.where(inside[None, :], h, 0.0)
        if DOT:
            p = tl.dot(b.to(h.dtype), tl.trans(h))
            to = shrunk + (rows[None, :] * RANK + rank[:, None]) * PARTS + part
            tl.store(to, p * gain[None, :], mask=rank[:, None] < RANK)
        elif RANK == 1:
            tl.store(shrunk + rows * PARTS + part, tl.sum(h.to(tl.float32) * b0[None, :], 1) * gain)
        elif RANK % 4 == 0:
            h = h.to(tl.float32)
            for j in tl.static_range(0, RANK, 4):
                start = (which * RANK + j) * WIDTH
                p0 = h * factor(shrink, start, columns, inside, CONVERT)[None, :]
                p1 = h * factor(shrink, start + WIDTH, columns, inside, CONVERT)[None, :]
                p2 = h * factor(shrink, start + 2 * WIDTH, columns, inside, CONVERT)[None, :]
                p3 = h * factor(shrink, start + 3 * WIDTH, columns, inside, CONVERT)[None, :]
                p0, p1, p2, p3 = tl.reduce((p0, p1, p2, p3), 1, add_four)
                to = shrunk + (rows * RANK + j) * PARTS + part
                tl.store(to, p0 * gain)
                tl.store(to + PARTS, p1 * gain)
                tl.store(to + 2 * PARTS, p2 * gain)
                tl.store(to + 3 * PARTS, p3 * gain)
        else:
            h = h.to(tl.float32)
            for j in tl.static_range(RANK):
                b = factor(shrink, (which * RANK + j) * WIDTH, columns, inside, CONVERT)
                tl.store(shrunk + (rows * RANK + j) * PARTS + part, tl.sum(h * b[None, :], 1) * gain)
