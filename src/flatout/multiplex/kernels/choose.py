"""Greedy choice over the vocabulary in two steps: the best of each chunk, then the best chunk.

Ties go to the lowest token id, as argmax does.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def best_of_chunks(
    logits,  # [rows, VOCABULARY]
    best_value,  # [rows, CHUNKS], written
    best_token,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(0, CHUNK, BLOCK):
        within = start + tl.arange(0, BLOCK)
        columns = chunk * CHUNK + within
        inside = (within < CHUNK) & (columns < VOCABULARY)
        y = tl.load(logits + row * VOCABULARY + columns, mask=inside, other=float("-inf")).to(tl.float32)
        token = tl.where(y > best, columns, token)
        best = tl.maximum(best, y)
    top = tl.max(best, 0)
    tl.store(best_value + row * CHUNKS + chunk, top)
    first = tl.min(tl.where(best == top, token, 2147483647), 0)
    tl.store(best_token + row * CHUNKS + chunk, tl.minimum(first, VOCABULARY - 1))  # NaN chooses nothing


@triton.jit
def advance(
    best_value,
    best_token,
    token,  # [rows] each, updated in place
    position,
    alive,
    reason,
    count,
    limit,
    emitted,  # [rows, emitted_stride]
    emitted_stride,
    eos,  # [NUM_EOS]
    EOS: tl.constexpr,  # what `reason` says of a row that chose an end
    LENGTH: tl.constexpr,  # and of one that is full
    NUM_EOS: tl.constexpr,
    BLOCK_EOS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Append the best token of a living row, and end the row if that was its last."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    value = tl.load(best_value + row * CHUNKS + chunk)
    candidate = tl.load(best_token + row * CHUNKS + chunk)
    top = tl.max(value, 0)
    chosen = tl.min(tl.where(value == top, candidate, 2147483647), 0).to(tl.int64)
    if tl.load(alive + row):
        so_far = tl.load(count + row)
        tl.store(emitted + row * emitted_stride + so_far, chosen)
        tl.store(count + row, so_far + 1)
        tl.store(position + row, tl.load(position + row) + 1)
        tl.store(token + row, chosen)
        end = tl.arange(0, BLOCK_EOS)
        ends = tl.load(eos + end, mask=end < NUM_EOS, other=-1)
        ended = tl.max((ends == chosen).to(tl.int32), 0) > 0
        full = so_far + 1 >= tl.load(limit + row)
        tl.store(reason + row, tl.where(ended, EOS, tl.where(full, LENGTH, 0)).to(tl.int64))
        tl.store(alive + row, ~(ended | full))
