"""Ragged samples into padded batches, one copy per field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.data.padding import Pad


class PadCollate:
    """A `collate_fn` that pads the first axis of every array to the longest sample of the batch.

    Samples are arrays, tensors, lists of numbers, scalars, or dicts and tuples of them.  `fields` names
    those that need their own `Pad`, by path: "tokens", "context.states", "0" for the first of a tuple, ""
    for a sample that is an array itself.  `pinned` asks for page-locked memory; `reuse` keeps that many
    buffers per field and takes one again once nothing refers to it.  Both are left to the DataLoader
    inside its workers, where batches are written straight into shared memory.
    """

    def __init__(
        self,
        fields: Mapping[str, Pad] | None = None,
        *,
        default: Pad | None = None,
        pinned: bool = False,
        reuse: int = 0,
    ) -> None:
        raise NotImplementedError

    def __call__(self, samples: Sequence[Any]) -> Any:
        raise NotImplementedError
