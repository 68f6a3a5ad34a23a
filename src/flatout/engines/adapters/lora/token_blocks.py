"""Batches of several tasks, laid end to end as one sequence of tokens.

Each step takes one *block* per task: a rectangle [rows, length] of token numbers of similar lengths.  The
blocks are flattened and put end to end to [1, N], so that the encoder's products see one tall matrix whatever
the tasks' shapes are, and the tokens of one adapter are one range of it.  Attention alone must know where
rows begin and end; `Layout` holds what it and the adapters read.

Tensors that depend on shapes alone are made once per shape and kept; those that depend on the lengths of a
batch are small and computed on the device, so that nothing waits for the host and a captured CUDA graph sees
the lengths of its own batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.data.rows.buffers import send
from flatout.ground.errors import BadInput
from flatout.ground.units import round_up
from flatout.multiplex.rows import VariantRange

Ints = npt.NDArray[np.int32]
Targets = dict[str, npt.NDArray[Any]]


class Padding(NamedTuple):
    """The shape that targets are padded to."""

    rows: int
    length: int
    pad_id: int
    row_multiple: int
    length_multiple: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBlock:
    """Rows of one adapter: `ids` [rows, length] int64, `lengths` [rows] of real tokens, at least 1 each.

    A padding row has length 1 and no target.  `types` are token type numbers, or None
    where the tokenizer gives none.
    """

    adapter: int
    ids: Tensor
    lengths: Tensor
    types: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes only: reading values would wait for the device."""
        if self.ids.ndim != 2 or self.lengths.shape != self.ids.shape[:1] or not self.ids.numel():
            raise BadInput(
                f"ids have shape {tuple(self.ids.shape)}, lengths {tuple(self.lengths.shape)}",
                hint="give ids [rows, length] and lengths [rows], neither empty",
            )
        if self.types is not None and self.types.shape != self.ids.shape:
            raise BadInput(
                f"token types have shape {tuple(self.types.shape)}, ids {tuple(self.ids.shape)}",
                hint="give one type for each token",
            )

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        """Tokens of a row, padding included."""
        return self.ids.shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens of the block, padding included."""
        return self.ids.numel()

    def mask(self) -> Tensor:
        """Return [rows, length], True at real tokens."""
        return torch.arange(self.length, device=self.lengths.device) < self.lengths[:, None]

    def to(self, device: torch.device | str) -> TokenBlock:
        """Copy the block to another device; copies from pinned memory do not wait."""
        return TokenBlock(
            adapter=self.adapter,
            ids=self.ids.to(device, non_blocking=True),
            lengths=self.lengths.to(device, non_blocking=True),
            types=None if self.types is None else self.types.to(device, non_blocking=True),
        )


TokenBlocks = tuple[TokenBlock, ...]


def block_of(
    examples: Sequence[np.ndarray],
    *,
    adapter: int,
    pad_id: int,
    types: Sequence[np.ndarray | None] | None = None,
    row_multiple: int = 1,
    length_multiple: int = 1,
    device: torch.device | str = "cpu",
) -> TokenBlock:
    """Make a block from lists of token numbers, padded to multiples so that few shapes occur.

    `types` gives the token types of each example, or None for all; rows that fill up hold `pad_id` and have
    length 1.
    """
    if not examples or any(len(example) == 0 for example in examples):
        raise BadInput(
            "there are no examples" if not examples else "an example has no tokens",
            hint="give at least one example, each with at least one token",
        )
    num_rows = round_up(len(examples), row_multiple)
    length = round_up(max(len(example) for example in examples), length_multiple)
    ids = np.full((num_rows, length), pad_id, dtype=np.int64)
    lengths = np.ones(num_rows, dtype=np.int64)
    for row, example in enumerate(examples):
        ids[row, : len(example)] = example
        lengths[row] = len(example)
    kinds = None
    if types is not None and any(one is not None for one in types):
        kinds = np.zeros((num_rows, length), dtype=np.int64)
        for row, one in enumerate(types):
            if one is not None:
                kinds[row, : len(one)] = one
    return TokenBlock(
        adapter=adapter,
        ids=send(ids, device),
        lengths=send(lengths, device),
        types=None if kinds is None else send(kinds, device),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a block: what is known without its values."""

    adapter: int
    num_rows: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.length


Shapes = tuple[Shape, ...]


def shapes_of(blocks: TokenBlocks) -> Shapes:
    return tuple(Shape(block.adapter, block.num_rows, block.length) for block in blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rectangle:
    """Neighbouring blocks of one length, which portable attention takes as one rectangle."""

    start: int
    num_rows: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.num_rows * self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What shapes alone decide; the same for every batch of these shapes."""

    shapes: Shapes
    ranges: tuple[VariantRange, ...]  # of tokens, by adapter
    runs: tuple[Rectangle, ...]
    num_tokens: int
    longest: int
    positions: Tensor  # [1, N] int64: the place of each token in its row
    starts: Tensor  # [rows] int32: where each row begins
    end: Tensor  # [1] int32: N


def frame(shapes: Shapes, *, device: torch.device | str) -> Frame:
    """Make the frame of blocks of these shapes."""
    ranges: list[VariantRange] = []
    runs: list[Rectangle] = []
    starts: list[int] = []
    at = 0
    for shape in shapes:
        ranges.append(VariantRange(variant=shape.adapter, start=at, stop=at + shape.num_tokens))
        if runs and runs[-1].length == shape.length:
            runs[-1] = Rectangle(
                start=runs[-1].start, num_rows=runs[-1].num_rows + shape.num_rows, length=shape.length
            )
        else:
            runs.append(Rectangle(start=at, num_rows=shape.num_rows, length=shape.length))
        starts += [at + row * shape.length for row in range(shape.num_rows)]
        at += shape.num_tokens
    positions = np.concatenate([np.tile(np.arange(shape.length), shape.num_rows) for shape in shapes])
    return Frame(
        shapes=shapes,
        ranges=tuple(ranges),
        runs=tuple(runs),
        num_tokens=at,
        longest=max(shape.length for shape in shapes),
        positions=torch.from_numpy(positions).to(device)[None],
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        end=torch.tensor([at], dtype=torch.int32, device=device),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A frame and the lengths of one batch."""

    frame: Frame
    lengths: Tensor  # [rows] int64, of all blocks in order

    def cumulative(self) -> Tensor:
        """Return the bounds of 2 * rows sequences, int32: the real tokens of a row, then its padding.

        Padding attends only to padding, so that attention needs no mask and no token is left out.
        """
        starts = self.frame.starts
        bounds = torch.stack((starts, starts + self.lengths.to(torch.int32)), dim=1).view(-1)
        return torch.cat((bounds, self.frame.end))

    def key_masks(self) -> tuple[Tensor | None, ...]:
        """Return for each run [rows, 1, 1, length], True at tokens that may be seen; None where all may.

        On a GPU there is always a mask: to see that none is needed would wait for the device.
        """
        masks: list[Tensor | None] = []
        row = 0
        for run in self.frame.runs:
            lengths = self.lengths[row : row + run.num_rows]
            row += run.num_rows
            if lengths.device.type == "cpu" and bool(lengths.eq(run.length).all()):
                masks.append(None)
                continue
            places = torch.arange(run.length, device=lengths.device)
            masks.append((places < lengths[:, None])[:, None, None, :])
        return tuple(masks)


def layout(blocks: TokenBlocks, *, known: Frame | None = None) -> Layout:
    """Make the layout of a batch; `known` is its frame, if it exists already."""
    if not blocks:
        raise BadInput("there is no block to encode", hint="give at least one")
    lengths = blocks[0].lengths if len(blocks) == 1 else torch.cat([block.lengths for block in blocks])
    return Layout(frame=known or frame(shapes_of(blocks), device=blocks[0].ids.device), lengths=lengths)


def rows_of(states: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
    """Split packed states [N, width] into one [rows, length, width] per block."""
    width = states.shape[-1]
    parts = states.view(-1, width).split([shape.num_tokens for shape in shapes])
    return tuple(
        part.view(shape.num_rows, shape.length, width) for part, shape in zip(parts, shapes, strict=True)
    )
