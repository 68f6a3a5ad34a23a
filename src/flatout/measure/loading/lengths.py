"""How ragged the samples of a batch are, and what padding them costs.

Samples are inspected between fetching and collating, while they still have their own length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.measure.batches import arrays_of, is_array
from flatout.measure.evidence import Lengths

MAX_FIELDS = 32


def sample_lengths(samples: Sequence[Any]) -> list[int] | None:
    """Return the length of each sample in its longest ragged field; None when no field is ragged."""
    fields: dict[object, list[int]] = {}
    for sample in samples:
        for key, length in _field_lengths(sample):
            fields.setdefault(key, []).append(length)
    ragged = [
        lengths
        for lengths in fields.values()
        if len(lengths) == len(samples) and min(lengths) != max(lengths)
    ]
    return max(ragged, key=max) if ragged else None


def _field_lengths(sample: Any) -> list[tuple[object, int]]:
    if isinstance(sample, dict):
        items: list[tuple[object, Any]] = list(sample.items())
    elif isinstance(sample, (tuple, list)):
        items = list(enumerate(sample))
    else:
        items = [("sample", sample)]
    found: list[tuple[object, int]] = []
    for key, value in items[:MAX_FIELDS]:
        if is_array(value):
            if len(value.shape) > 0:
                found.append((key, int(value.shape[0])))
        elif isinstance(value, (list, tuple)):
            found.append((key, len(value)))
    return found


def is_padded(batch: Any, lengths: Sequence[int]) -> bool:
    """Return whether some array of the batch has the shape samples × at least the longest length."""
    longest = max(lengths)
    return any(
        len(array.shape) >= 2 and longest <= max(array.shape[1:]) and array.shape[0] == len(lengths)
        for array in arrays_of(batch)
    )


def summarise(batches: Sequence[Sequence[int]]) -> Lengths | None:
    """Summarise padding as it was, and as it would be with samples of similar length batched together."""
    if not batches:
        return None
    everything = sorted(length for lengths in batches for length in lengths)
    size = max(1, round(len(everything) / len(batches)))
    bucketed = [everything[i : i + size] for i in range(0, len(everything), size)]
    return Lengths(
        num_samples=len(everything),
        mean=sum(everything) / len(everything),
        max=everything[-1],
        padded_share=_padded_share(batches),
        bucketed_share=_padded_share(bucketed),
    )


def _padded_share(batches: Sequence[Sequence[int]]) -> float:
    positions = sum(len(lengths) * max(lengths) for lengths in batches)
    return 1 - sum(sum(lengths) for lengths in batches) / positions if positions else 0.0
