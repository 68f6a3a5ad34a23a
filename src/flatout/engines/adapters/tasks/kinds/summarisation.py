"""Summarisation: a short text for a long one.

A line is {"document": "...", "summary": "..."}; lines with "source" and "target" as lists of sentences work
too; each target is then one of several right summaries.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flatout.engines.adapters.tasks.data_rows import Record, text_field
from flatout.engines.adapters.tasks.generation import GenerationTask
from flatout.engines.adapters.tasks.metrics import Order, rouge

ORDERS: tuple[Order, ...] = ("1", "2", "L")


@dataclass(frozen=True, kw_only=True)
class Summarisation(GenerationTask):
    """A short text for a long one, scored by ROUGE against the most similar summary."""

    name: ClassVar[str] = "summarisation"
    inputs: ClassVar[tuple[str, ...]] = ("document",)
    answers: ClassVar[tuple[str, ...]] = ("summary",)
    also_named: ClassVar[Mapping[str, tuple[str, ...]]] = {"document": ("source",)}

    def answers_of(self, row: Mapping[str, Any], record: Record) -> Record:
        several = row.get("target")
        if isinstance(several, list) and several:
            references = [text_field({"target": text}, "target") for text in several]
        else:
            references = [text_field(row, "summary", "target")]
        return {"summary": references[0], "references": references}

    def text_scores(self, said: Sequence[str], records: Sequence[Record]) -> dict[str, float]:
        references = [record.get("references", [record["summary"]]) for record in records]
        return {f"rouge_{order.lower()}": rouge(said, references, order=order) for order in ORDERS}

    def generated_row(self, draw: random.Random) -> Record:
        gist = f"the {draw.choice(_WHO)} {draw.choice(_DID)} the {draw.choice(_WHAT)} {draw.choice(_WHEN)}."
        document = " ".join([gist, *draw.sample(_ASIDE, 3)])
        return {"document": document, "summary": gist, "references": [gist]}


# A generated world: reports that open with what matters.
_WHO = ("city", "school", "museum", "library", "harbour", "theatre", "hospital", "market")
_DID = ("opens", "closes", "repairs", "paints", "sells", "moves")
_WHAT = ("bridge", "garden", "tower", "hall", "roof", "gate", "clock", "boat")
_WHEN = ("in spring", "on monday", "next year", "this week", "after the storm", "before winter")
_ASIDE = (
    "many people came to see it.",
    "the weather was fine and the streets were full.",
    "nobody knows yet what it will cost.",
    "the old plans had been lost for years.",
    "a band played until late.",
    "there was tea for everyone.",
)
