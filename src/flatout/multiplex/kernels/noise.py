"""Normal numbers by table, drawn on the GPU: the same words and the same table as on a CPU.

A program draws BLOCK counters of one pair: Philox in registers, then eight table entries each.  The words are
interleaved into the order of the elements first, so that reads of the table are the only scattered access;
the table (64 to 256 KiB) stays in the caches, and the numbers leave in whole lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256


@triton.jit(do_not_specialize=["key_low", "key_high", "epoch", "first", "count"])
def draw(
    out,  # [pairs, count], rows `stride` apart
    values,  # [65536]
    pairs,  # [pairs]
    key_low,
    key_high,
    epoch,
    first,
    count,
    stride,
    num_blocks,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    block = first.to(tl.int64) // 8 + (tl.program_id(0) % num_blocks).to(tl.int64) * BLOCK
    pair = tl.load(pairs + row)
    blocks = block + tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        blocks.to(tl.uint32),
        zeros + pair.to(tl.uint32),
        zeros + epoch.to(tl.uint32),
        zeros,  # the domain of normal numbers
        key_low.to(tl.uint32),
        key_high.to(tl.uint32),
    )
    low = tl.interleave(tl.interleave(w0 & 0xFFFF, w2 & 0xFFFF), tl.interleave(w1 & 0xFFFF, w3 & 0xFFFF))
    high = tl.interleave(tl.interleave(w0 >> 16, w2 >> 16), tl.interleave(w1 >> 16, w3 >> 16))
    entries = tl.interleave(low, high).to(tl.int32)
    element = block * 8 + tl.arange(0, 8 * BLOCK) - first
    inside = (element >= 0) & (element < count)
    tl.store(out + row * stride + element, tl.load(values + entries, mask=inside), mask=inside)


def fill_with_triton(
    out: Tensor, *, values: Tensor, key: tuple[int, int], epoch: int, pairs: Tensor, first: int
) -> None:
    """Fill `out` [pairs, count] with elements first, first + 1, ... of each pair."""
    num_pairs, count = out.shape
    counters = -(-(first + count) // 8) - first // 8
    num_blocks = triton.cdiv(counters, BLOCK)
    words = (as_signed(word) for word in (*key, epoch))
    draw[(num_pairs * num_blocks,)](
        out, values, pairs, *words, first, count, out.stride(0), num_blocks, BLOCK=BLOCK
    )


def as_signed(word: int) -> int:
    """The same 32 bits below 2**31: a larger integer would have the kernel compiled again for 64 bits."""
    return word - (word >> 31 << 32)
