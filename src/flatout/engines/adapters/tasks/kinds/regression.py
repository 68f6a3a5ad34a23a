"""Regression: a number for a text, by the same small network as a classifier's with one output.

A line is {"text": "...", "value": 3.5}.  The head learns standardised values, so that a learning rate does
not depend on the unit of a file; mean and deviation are those of the training rows, and the run keeps them.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from flatout.engines.adapters.lora.chunked_loss import IGNORED
from flatout.engines.adapters.lora.token_blocks import Ints, Padding, Targets
from flatout.engines.adapters.tasks.data_rows import Record, Splits
from flatout.engines.adapters.tasks.decoder import TextDecoder
from flatout.engines.adapters.tasks.kinds.classification import PooledHead
from flatout.engines.adapters.tasks.metrics import explained_variance, pearson, spearman
from flatout.engines.adapters.tasks.task import AdapterTask, Asked, Example, Prediction, TaskBatch
from flatout.ground.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Regression(AdapterTask):
    """A number for a text; `deviation` is None until rows or a run have given it."""

    mean: float = 0.0
    deviation: float | None = None

    name: ClassVar[str] = "regression"
    metric: ClassVar[str] = "explained"
    inputs: ClassVar[tuple[str, ...]] = ("text",)
    from_rows: ClassVar[tuple[str, ...]] = ("mean", "deviation")
    answers: ClassVar[tuple[str, ...]] = ("value",)
    also_named: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text": ("sentence",),
        "value": ("score", "label"),
    }

    def answers_of(self, row: Mapping[str, Any], record: Record) -> Record:
        (field,) = self.answers
        names = (field, *self.also_named.get(field, ()))
        return {field: _number(next((row[name] for name in names if name in row), None), field)}

    def settings_from(self, splits: Splits) -> dict[str, Any]:
        """Return the mean and the deviation of the values to train on."""
        values = [self._value(record) for record in splits.train]
        deviation = statistics.pstdev(values)
        if deviation == 0:
            raise BadInput(
                f"every training row of {splits.origin} has the {self.answers[0]} {values[0]:g}",
                hint="give rows with different values: one number teaches nothing",
            )
        return {"mean": statistics.fmean(values), "deviation": deviation}

    def describe(self, splits: Splits) -> str:
        return f"{self.answers[0]} {self.mean:.4g} on average, deviation {self.deviation or 1.0:.4g}"

    def generated_row(self, draw: random.Random) -> Record:
        number = draw.randrange(len(_SIZES))
        thing, place, colour = draw.choice(_THINGS), draw.choice(_PLACES), draw.choice(_COLOURS)
        return {"text": f"the {colour} {thing} {place} is {_SIZES[number]}.", "value": float(number)}

    def targets_of(self, record: Record, tokenizer: Any) -> Mapping[str, Ints]:
        value = (self._value(record) - self.mean) / (self.deviation or 1.0)
        return {"value": np.array(value, dtype=np.float32)}

    def pad_targets(self, examples: Sequence[Example], to: Padding) -> Targets:
        """Mark rows that have a value in `real`: no number can stand for a missing one."""
        real, values = np.full(to.rows, IGNORED, dtype=np.int64), np.zeros(to.rows, dtype=np.float32)
        for row, example in enumerate(examples):
            if example.trainable:
                real[row], values[row] = 1, example.targets["value"]
        return {"real": real, "value": values}

    def head(self, width: int, *, decoder: TextDecoder | None = None) -> nn.Module:
        return PooledHead(width, num_outputs=1)

    def loss(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch) -> Tensor:
        said_B = head(states_BLH, batch.block.lengths).float()[:, 0]
        off_B = torch.where(batch.targets["real"] == 1, said_B - batch.targets["value"], 0.0)
        return off_B.square().sum() / batch.count.clamp_min(1)

    def answer(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch, asked: Asked) -> list[Prediction]:
        said = head(states_BLH, batch.block.lengths).float()[:, 0].tolist()
        scale = self.deviation or 1.0
        return [Prediction(text=f"{self.mean + scale * one:.6g}") for one in said[: len(batch.examples)]]

    def text_scores(self, said: Sequence[str], records: Sequence[Record]) -> dict[str, float]:
        true = [self._value(record) for record in records]
        guess = statistics.fmean(true) if true else 0.0  # for a row that is not answered
        numbers = [_read(text, default=guess) for text in said]
        return {
            "explained": explained_variance(numbers, true),
            "pearson": pearson(numbers, true),
            "spearman": spearman(numbers, true),
        }

    def _value(self, record: Record) -> float:
        return float(record[self.answers[0]])


def _number(value: Any, field: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number):
        return number
    said = "is missing" if value is None else f"is {value!r}, not a number"
    raise BadInput(f"'{field}' {said}", hint=f"a line has a finite {field}")


def _read(text: str, *, default: float) -> float:
    try:
        return float(text)
    except ValueError:
        return default


# A generated world: things from tiny to vast.
_SIZES = ("tiny", "small", "plain", "large", "huge", "vast")
_THINGS = ("house", "garden", "river", "market", "tower", "bridge", "hall", "school", "field", "harbour")
_PLACES = ("here", "over there", "behind us", "in the town", "by the sea", "near the hills", "of my uncle")
_COLOURS = ("red", "green", "blue", "white", "black", "grey", "brown", "yellow")
