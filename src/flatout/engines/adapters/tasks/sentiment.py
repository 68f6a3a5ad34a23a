"""Sentiment: is a sentence for or against?  A small network on the mean of the encoder's states.

A line is {"text": "...", "label": "positive"}; 0 and 1, "neg" and "pos" are understood.  A ZIP with one
member ending in .neg and one in .pos, a sentence per line, is read as it is.
"""

from __future__ import annotations

import random
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.engines.adapters.lora.encoder import pooled
from flatout.engines.adapters.tasks.decoder import TextDecoder
from flatout.engines.adapters.tasks.metrics import accuracy, macro_f1
from flatout.engines.adapters.tasks.rows import Record
from flatout.engines.adapters.tasks.task import (
    IGNORED,
    AdapterTask,
    Asked,
    Example,
    Ints,
    Padding,
    Prediction,
    Targets,
    TaskBatch,
)
from flatout.ground.errors import BadInput

LABELS = ("negative", "positive")
WRITTEN = {"0": 0, "1": 1, "neg": 0, "pos": 1, "negative": 0, "positive": 1}


class SentimentHead(nn.Module):
    """Mean of a row's real tokens -> half the width -> labels."""

    def __init__(self, width: int, *, num_labels: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width // 2), nn.GELU(), nn.Dropout(dropout), nn.Linear(width // 2, num_labels)
        )

    def forward(self, states_BLH: Tensor, lengths_B: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        logits: Tensor = self.layers(pooled(states_BLH.to(dtype), lengths_B))
        return logits


@dataclass(frozen=True, kw_only=True)
class Sentiment(AdapterTask):
    """Two labels for a text."""

    name: ClassVar[str] = "sentiment"
    metric: ClassVar[str] = "accuracy"
    inputs: ClassVar[tuple[str, ...]] = ("text",)
    answers: ClassVar[tuple[str, ...]] = ("label",)
    also_named: ClassVar[Mapping[str, tuple[str, ...]]] = {"text": ("sentence",)}

    def record_of(self, row: Mapping[str, Any], *, answered: bool = True) -> Record:
        record = super().record_of(row, answered=False)
        if not answered:
            return record
        given = str(row.get("label")).lower()
        if given not in WRITTEN:
            raise BadInput(f"'label' is {row.get('label')!r}", hint=f"known: {', '.join(WRITTEN)}")
        return {**record, "label": LABELS[WRITTEN[given]]}

    def class_of(self, record: Record) -> str | None:
        return str(record["label"])

    def read(self, path: Path) -> list[Record]:
        return _read_zip(path) if path.suffix == ".zip" else super().read(path)

    def generated_row(self, draw: random.Random) -> Record:
        is_good = draw.random() < 0.5
        kind, other = (_GOOD, _BAD) if is_good else (_BAD, _GOOD)
        one, two, third = draw.sample(_THINGS, 3)
        first, second = draw.sample(kind, 2)
        degree, last = draw.choice(_DEGREES), draw.choice(other)
        text = f"the {one} is {degree} {first} and the {two} is {second}, for all its {last} {third}."
        return {"text": text, "label": LABELS[is_good]}

    def targets_of(self, record: Record, tokenizer: Any) -> Mapping[str, Ints]:
        return {"label": np.array(LABELS.index(record["label"]), dtype=np.int32)}

    def pad_targets(self, examples: Sequence[Example], to: Padding) -> Targets:
        labels = np.full(to.rows, IGNORED, dtype=np.int64)
        for row, example in enumerate(examples):
            if example.trainable:
                labels[row] = example.targets["label"]
        return {"label": labels}

    def head(self, width: int, *, decoder: TextDecoder | None = None) -> nn.Module:
        return SentimentHead(width, num_labels=len(LABELS))

    def loss(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch) -> Tensor:
        logits = head(states_BLH, batch.block.lengths).float()
        summed = F.cross_entropy(logits, batch.targets["label"], ignore_index=IGNORED, reduction="sum")
        return summed / batch.count.clamp_min(1)

    def answer(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch, asked: Asked) -> list[Prediction]:
        best = head(states_BLH, batch.block.lengths).argmax(1).tolist()
        return [Prediction(text=LABELS[label]) for label in best[: len(batch.examples)]]

    def text_scores(self, said: Sequence[str], records: Sequence[Record]) -> dict[str, float]:
        true = [record["label"] for record in records]
        return {"accuracy": accuracy(said, true), "macro_f1": macro_f1(said, true)}


def _read_zip(path: Path) -> list[Record]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {
                suffix: [name for name in archive.namelist() if name.endswith(suffix)]
                for suffix in (".neg", ".pos")
            }
            texts = {suffix: archive.read(names[0]) for suffix, names in members.items() if names}
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist", hint="check the path") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if len(texts) != 2:
        raise BadInput(
            f"{path} lacks a member ending in .neg or one in .pos", hint="give both, or a JSONL file"
        )
    return [
        {"text": line.strip(), "label": LABELS[WRITTEN[suffix.strip(".")]]}
        for suffix, text in texts.items()
        for line in _decoded(text).splitlines()
        if line.strip()
    ]


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return text.decode("latin-1")


# A generated world: adjectives that praise or blame, beside words that say nothing.
_GOOD = ("wonderful", "moving", "clever", "funny", "warm", "brilliant", "gentle", "honest", "lovely")
_BAD = ("dull", "clumsy", "boring", "silly", "cold", "hollow", "tedious", "noisy", "false", "ugly")
_THINGS = ("film", "story", "cast", "ending", "script", "music", "camera", "hero", "villain", "scene")
_DEGREES = ("rather", "quite", "truly", "deeply", "simply", "often", "mostly")
