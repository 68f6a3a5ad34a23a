"""Similarity: a score for a pair of texts, which the encoder reads together.

A line is {"text": "...", "other": "...", "score": 4.2}; `sentence1` and `sentence2` are understood.  Read
together, words of one text meet those of the other in every layer: better than comparing two vectors, and a
pass per pair.  Where a pair is too long, the longer text is cut first.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flatout.engines.adapters.tasks.data_rows import Record
from flatout.engines.adapters.tasks.kinds.regression import Regression
from flatout.engines.adapters.tasks.task import Example, example_of_pair


@dataclass(frozen=True, kw_only=True)
class Similarity(Regression):
    """A score for two texts."""

    name: ClassVar[str] = "similarity"
    metric: ClassVar[str] = "spearman"
    inputs: ClassVar[tuple[str, ...]] = ("text", "other")
    answers: ClassVar[tuple[str, ...]] = ("score",)
    context: ClassVar[str | None] = "other"
    also_named: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text": ("sentence1",),
        "other": ("sentence2",),
        "score": ("value", "label"),
    }

    def encode(self, record: Record, tokenizer: Any, *, max_length: int, index: int = 0) -> Example:
        encoded = tokenizer(
            record["text"],
            record["other"],
            truncation="longest_first",
            max_length=max_length,
            return_token_type_ids=True,
        )
        targets = self.targets_of(record, tokenizer) if self.answers[0] in record else {}
        return example_of_pair(encoded, index=index, targets=targets)

    def generated_row(self, draw: random.Random) -> Record:
        first = draw.sample(_WORDS, 4)
        shared = draw.randrange(5)
        fresh = draw.sample([word for word in _WORDS if word not in first], 4 - shared)
        second = [*first[:shared], *fresh]
        draw.shuffle(second)
        return {"text": " ".join(first), "other": " ".join(second), "score": float(shared)}


# A generated world: how many of four words two texts share.
_WORDS = ("rain", "piano", "bread", "river", "tower", "storm", "apple", "violin", "bridge", "cloud", "garden")
