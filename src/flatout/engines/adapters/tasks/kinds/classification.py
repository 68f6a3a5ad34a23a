"""Classification: one of several labels for a text, by a small network on the mean of the encoder's states.

A line is {"text": "...", "label": "billing"}; a label is a text or a number.  Which labels there are is read
from the rows, in alphabetical order (numbers by their size), unless the settings name them: `labels: [a, b]`.
A run keeps them, because the head's outputs are numbered by them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.engines.adapters.lora.chunked_loss import IGNORED
from flatout.engines.adapters.lora.encoder import pool_rows
from flatout.engines.adapters.lora.token_blocks import Ints, Padding, Targets
from flatout.engines.adapters.tasks.data_rows import Record, Splits
from flatout.engines.adapters.tasks.decoder import TextDecoder
from flatout.engines.adapters.tasks.metrics import accuracy, label_f1, macro_f1
from flatout.engines.adapters.tasks.task import AdapterTask, Asked, Example, Prediction, TaskBatch
from flatout.ground.errors import BadInput
from flatout.ground.units import show_some

MOST_SHOWN = 8  # labels in one line


class PooledHead(nn.Module):
    """Mean of a row's real tokens -> half the width -> outputs."""

    def __init__(self, width: int, *, num_outputs: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width // 2), nn.GELU(), nn.Dropout(dropout), nn.Linear(width // 2, num_outputs)
        )

    def forward(self, states_BLH: Tensor, lengths_B: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        outputs: Tensor = self.layers(pool_rows(states_BLH.to(dtype), lengths_B))
        return outputs


@dataclass(frozen=True, kw_only=True)
class Classification(AdapterTask):
    """One label for a text; `labels` are empty until rows or a run have named them."""

    labels: tuple[str, ...] = ()

    name: ClassVar[str] = "classification"
    metric: ClassVar[str] = "accuracy"
    inputs: ClassVar[tuple[str, ...]] = ("text",)
    from_rows: ClassVar[tuple[str, ...]] = ("labels",)
    answers: ClassVar[tuple[str, ...]] = ("label",)
    also_named: ClassVar[Mapping[str, tuple[str, ...]]] = {"text": ("sentence",)}

    def __post_init__(self) -> None:
        """Take labels as a settings file writes them."""
        given: Any = self.labels
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise BadInput(f"labels={given!r} is not a list", hint="write labels: [first, second]")
        labels = tuple(_label_of(label) for label in given)
        if len(set(labels)) < len(labels) or len(labels) == 1:
            raise BadInput(f"labels={list(labels)} must be two or more different labels")
        object.__setattr__(self, "labels", labels)

    def answers_of(self, row: Mapping[str, Any], record: Record) -> Record:
        label = _label_of(row.get("label"))
        if self.labels and label not in self.labels:
            raise BadInput(
                f"'label' is {label!r}", hint=f"the labels are {show_some(self.labels, most=MOST_SHOWN)}"
            )
        return {"label": label}

    def class_of(self, record: Record) -> str | None:
        return str(record["label"])

    def settings_from(self, splits: Splits) -> dict[str, Any]:
        """Name the labels that the rows have."""
        found = {record["label"] for record in (*splits.train, *splits.validation, *splits.test)}
        if len(found) < 2:
            raise BadInput(
                f"every row of {splits.origin} has the label {show_some(found, most=MOST_SHOWN)}",
                hint="a classifier needs rows of two labels or more",
            )
        return {"labels": sorted(found, key=_order)}

    def describe(self, splits: Splits) -> str | None:
        counts = Counter(record["label"] for record in splits.train)
        untrained = [label for label in self.labels if not counts[label]]
        said = f"{len(self.labels)} labels: {show_some(self.labels, most=MOST_SHOWN)}"
        return f"{said}; no training row has {show_some(untrained, most=MOST_SHOWN)}" if untrained else said

    def generated_row(self, draw: random.Random) -> Record:
        number = draw.randrange(min(len(self.labels) or len(_WORLD), len(_WORLD)))
        first, second = draw.sample(list(_WORLD.values())[number], 2)
        text = f"{draw.choice(_TIMES)} {draw.choice(_OPENINGS)} the {first} and the {second}."
        return {"text": text, "label": (self.labels or tuple(_WORLD))[number]}

    def targets_of(self, record: Record, tokenizer: Any) -> Mapping[str, Ints]:
        return {"label": np.array(self.labels.index(record["label"]), dtype=np.int32)}

    def pad_targets(self, examples: Sequence[Example], to: Padding) -> Targets:
        labels = np.full(to.rows, IGNORED, dtype=np.int64)
        for row, example in enumerate(examples):
            if example.trainable:
                labels[row] = example.targets["label"]
        return {"label": labels}

    def head(self, width: int, *, decoder: TextDecoder | None = None) -> nn.Module:
        assert self.labels, "a run reads its labels before it makes a head"
        return PooledHead(width, num_outputs=len(self.labels))

    def loss(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch) -> Tensor:
        logits = head(states_BLH, batch.block.lengths).float()
        summed = F.cross_entropy(logits, batch.targets["label"], ignore_index=IGNORED, reduction="sum")
        return summed / batch.count.clamp_min(1)

    def answer(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch, asked: Asked) -> list[Prediction]:
        best = head(states_BLH, batch.block.lengths).argmax(1).tolist()
        return [Prediction(text=self.labels[label]) for label in best[: len(batch.examples)]]

    def text_scores(self, said: Sequence[str], records: Sequence[Record]) -> dict[str, float]:
        true = [record["label"] for record in records]
        return {"accuracy": accuracy(said, true), "macro_f1": macro_f1(said, true)}

    def class_scores(self, said: Sequence[str], records: Sequence[Record]) -> dict[str, float]:
        return label_f1(said, [record["label"] for record in records], labels=self.labels)


def _label_of(value: Any) -> str:
    """Return a label as text; raise BadInput if it is neither a text nor a whole number."""
    if isinstance(value, (str, int)) and str(value).strip():
        return str(value).strip()
    said = "is missing" if value is None else f"is {value!r}, neither a text nor a whole number"
    raise BadInput(
        f"'label' {said}", hint="a line has text and label; to predict a number, use a regression task"
    )


def _order(label: str) -> tuple[bool, int, str]:
    number = label.removeprefix("-")
    return (False, int(label), label) if number.isdecimal() else (True, 0, label)


# A generated world: what messages are about.
_WORLD = {
    "food": ("soup", "bread", "cheese", "apple", "rice", "onion"),
    "music": ("piano", "drum", "choir", "song", "violin", "flute"),
    "sport": ("goal", "team", "race", "ball", "match", "runner"),
    "travel": ("train", "ticket", "hotel", "border", "ship", "map"),
    "weather": ("rain", "storm", "wind", "snow", "fog", "cloud"),
}
_OPENINGS = ("we spoke of", "she wrote about", "they liked", "nobody saw", "we waited for")
_TIMES = ("today", "yesterday", "at noon", "last year", "once", "in spring", "before lunch", "again")
