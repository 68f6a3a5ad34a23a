"""Normal numbers by table, drawn on the GPU: the same words and the same table as on a CPU.

A program draws BLOCK counters of one pair: Philox in registers, then eight table entries each.  The words are
interleaved into the order of the elements first, so that reads of the table are the only scattered access;
the table (64 to 256 KiB) stays in the caches, and the numbers leave in whole lines.

`draw_all` does this for all parameters of a model in one launch: a population's factors are hundreds of small
tensors, and launching each would take the host longer than the GPU takes to draw them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
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
    entries = drawn_entries(block, pair, epoch, key_low, key_high, BLOCK)
    element = block * 8 + tl.arange(0, 8 * BLOCK) - first
    inside = (element >= 0) & (element < count)
    tl.store(out + row * stride + element, tl.load(values + entries, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["epoch", "first_pair", "num_pairs"])
def draw_all(
    parts,  # [parts, 4]: address of a [pairs, count] tensor, count, and the two words of its key
    values,  # [65536]
    epoch,
    first_pair,
    num_pairs,
    BLOCK: tl.constexpr,
):
    part = parts + tl.program_id(1) * 4
    count = tl.load(part + 1)
    num_blocks = tl.cdiv(count, 8 * BLOCK)
    row = tl.program_id(0) // num_blocks
    if row < num_pairs:
        block = (tl.program_id(0) % num_blocks) * BLOCK
        pair = first_pair.to(tl.int64) + row
        entries = drawn_entries(block, pair, epoch, tl.load(part + 2), tl.load(part + 3), BLOCK)
        element = block * 8 + tl.arange(0, 8 * BLOCK)
        out = tl.load(part).to(tl.pointer_type(values.dtype.element_ty)) + row * count
        tl.store(out + element, tl.load(values + entries, mask=element < count), mask=element < count)


@triton.jit
def drawn_entries(block, pair, epoch, key_low, key_high, BLOCK: tl.constexpr):
    """Draw the table entries of BLOCK counters from `block` on, eight each, in the order of the elements."""
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
    return tl.interleave(low, high).to(tl.int32)


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
    """Return the same 32 bits below 2**31: a larger integer would compile the kernel again for 64."""
    return word - (word >> 31 << 32)


def part_table(outs: Sequence[Tensor], keys: Sequence[tuple[int, int]]) -> Tensor:
    """Make what `fill_all` reads of contiguous tensors [pairs, count], each with its stream's key."""
    rows = [
        (out.data_ptr(), out.shape[1], *(as_signed(word) for word in key))
        for out, key in zip(outs, keys, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=outs[0].device)


def fill_all(parts: Tensor, *, values: Tensor, epoch: int, pairs: range, largest: int) -> None:
    """Fill the tensors of `parts` with the numbers of `pairs`; none counts more than `largest` a pair."""
    grid = (len(pairs) * triton.cdiv(largest, 8 * BLOCK), len(parts))
    draw_all[grid](parts, values, as_signed(epoch), as_signed(pairs.start), len(pairs), BLOCK=BLOCK)
