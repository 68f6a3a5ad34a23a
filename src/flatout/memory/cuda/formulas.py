"""Workspaces whose size grows in steps: what a kernel takes, from a few counts.

Everything else in a trace is a polynomial in the batch; these are not, because kernels choose grids and
paths.  A storage that has a formula keeps its counts, which are polynomials, so that a replay at another
size evaluates the formula there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

ASSUMED_MULTIPROCESSORS = 132  # of an H200, assumed for a GPU whose own are not known
WARP, MOST_THREADS, THREADS_PER_MULTIPROCESSOR = 32, 512, 2048
FEWEST_VALUES, MOST_VALUES = 16, 256  # that one thread adds
SORTED_FROM = 3072  # indices: fewer are added without sorting
ROWS_PER_PIECE = 10
# values that a thread seeks the largest of, blocks of a multiprocessor, and the length from which up to so
# many rows are shared by blocks: from PyTorch's `TensorTopK.cu`
FEWEST_SOUGHT, MOST_SOUGHT, BLOCKS_OF_DIGITS = 4, 64, 6
LONG_ROWS = ((20, 20_000), (40, 10_000), (79, 8000), (199, 5000), (799, 3000), (4000, 800), (1 << 62, 400))
MANY_ROWS, ROWS_PER_BLOCK, MOST_BLOCKS = 65_536, 32, 32_768


class Formula(NamedTuple):
    """A name in `FORMULAS` and the counts it takes."""

    name: str
    counts: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return FORMULAS[self.name](*self.counts)


def partial_sums(
    num_outputs: int,
    num_inputs: int,
    num_multiprocessors: int,
    num_in_row: int | None = None,
    itemsize: int = 4,
) -> int:
    """Return the bytes of partial sums: where many inputs become few outputs, several blocks share an output.

    Threads of a block run along the outputs, up to four outputs at a time if the number in one row is
    divisible by that.  One row holds all outputs unless the sum goes over a dimension between others.
    """
    vector = next(size for size in (4, 2, 1) if (num_in_row or num_outputs) % size == 0)
    columns, threads = num_outputs // vector, MOST_THREADS // vector
    width = min(_power_below(columns, threads), WARP)
    height = min(_power_below(num_inputs, threads), threads // width)
    width = min(_power_below(columns, threads), threads // height)
    if num_inputs < min(height * 16, MOST_VALUES):
        return 0
    values, grid = -(-num_inputs // height), -(-columns // width)
    target = num_multiprocessors * (THREADS_PER_MULTIPROCESSOR // (width * height))
    if values < MOST_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // FEWEST_VALUES)), -(-values // MOST_VALUES))
    return itemsize * num_outputs * blocks * width * vector if blocks > 1 else 0


def block_sums(num_rows: int, width: int, itemsize: int, num_multiprocessors: int) -> int:
    """Return the bytes of the sums by block of a norm's weight gradient, if its rows are many and narrow."""
    return _num_blocks(num_rows, width, num_multiprocessors) * width * itemsize


def sums_of_blocks(num_rows: int, width: int, num_multiprocessors: int) -> int:
    """Return the bytes of the partial sums with which these blocks are added."""
    num_blocks = _num_blocks(num_rows, width, num_multiprocessors)
    return partial_sums(width, num_blocks, num_multiprocessors) if num_blocks else 0


def either(count: int, below: int, bytes_below: int, bytes_from: int) -> int:
    """Return one amount below a bound and another from it on, for a kernel that is chosen by a count."""
    return bytes_below if count < below else bytes_from


def between(count: int, least: int, most: int, bytes_between: int, bytes_outside: int) -> int:
    """Return one amount for counts from `least` to `most`, another for all others."""
    return bytes_between if least <= count <= most else bytes_outside


def shared_tiles(num_positions: int, of_a_share: int, most_shares: int, tile_bytes: int, beside: int) -> int:
    """Return the bytes of a sum over positions, shared by as many multiprocessors as have enough to add."""
    shares = min(most_shares, num_positions // of_a_share)
    return (shares * tile_bytes if shares > 1 else 0) + beside


def _num_blocks(num_rows: int, width: int, num_multiprocessors: int) -> int:
    if num_rows <= MANY_ROWS or width // WARP >= num_multiprocessors // 2:
        return 0
    return min(MOST_BLOCKS // -(-width // WARP), -(-num_rows // ROWS_PER_BLOCK))


def _power_below(count: int, most: int) -> int:
    return most if count >= most else 1 << (count.bit_length() - 1) if count else 1


def sorted_indices(count: int) -> int:
    """Return the bytes of the sorted copy of many indices."""
    return 8 * count if count > SORTED_FROM else 0


def pieces_of_a_table(count: int, num_rows: int, width: int) -> int:
    """Return the bytes of an embedding's gradient: rows of equal index as pieces, then their sums."""
    if count <= SORTED_FROM:
        return 0
    return (count // ROWS_PER_PIECE + min(count, num_rows)) * width * 4


def counts_of_digits(num_rows: int, length: int, num_multiprocessors: int) -> int:
    """Return the bytes in which blocks count the digits of rows whose largest values are sought.

    Long rows have blocks of their own, the shorter the more rows there are; others take nothing.
    """
    if length < next(least for most, least in LONG_ROWS if num_rows <= most):
        return 0
    blocks = num_multiprocessors * BLOCKS_OF_DIGITS
    values = min(max(-(-num_rows * length // (blocks * 256)), FEWEST_SOUGHT), MOST_SOUGHT)
    per_row = -(-length // (values * 256))
    return num_rows * (per_row * 2 + 4) * 256


FORMULAS: Mapping[str, Callable[..., int]] = {
    "partial sums": partial_sums,
    "sorted indices": sorted_indices,
    "pieces of a table": pieces_of_a_table,
    "block sums": block_sums,
    "sums of blocks": sums_of_blocks,
    "either": either,
    "between": between,
    "counts of digits": counts_of_digits,
    "shared tiles": shared_tiles,
}
