"""Recurrent models on cuDNN: LSTMs and (held out) GRUs, as language models and as taggers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.memory.configuration import Configuration, Subject, token_ids

VOCABULARY = 20000


class RecurrentModel(nn.Module):
    """Embedding, a recurrent stack, one score per class and position."""

    def __init__(
        self, cell: str, *, width: int, num_layers: int, num_classes: int, both_ways: bool, packed: bool
    ) -> None:
        super().__init__()
        self.packed = packed
        self.embedding = nn.Embedding(VOCABULARY, width)
        make = nn.LSTM if cell == "lstm" else nn.GRU
        self.stack: Any = make(
            width, width, num_layers=num_layers, batch_first=True, dropout=0.1, bidirectional=both_ways
        )
        self.head = nn.Linear(width * (2 if both_ways else 1), num_classes)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        if self.packed:
            packed = pack_padded_sequence(hidden, lengths.cpu(), batch_first=True, enforce_sorted=False)
            hidden = pad_packed_sequence(self.stack(packed)[0], batch_first=True)[0]
        else:
            hidden = self.stack(hidden)[0]
        scores: Tensor = self.head(hidden)
        return scores


def _make_batch(num_classes: int) -> Any:
    def make(*, batch_size: int, length: int) -> dict[str, Tensor]:
        lengths = torch.linspace(length // 2, length, batch_size).round().long()
        lengths[-1] = length
        return {
            "ids": token_ids(batch_size, length, vocabulary=VOCABULARY),
            "lengths": lengths,
            "labels": token_ids(batch_size, length, vocabulary=num_classes),
        }

    return make


def _tag(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["ids"], batch["lengths"])
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def _subject(
    cell: str,
    *,
    width: int,
    num_layers: int = 2,
    num_classes: int = VOCABULARY,
    both_ways: bool = False,
    packed: bool = False,
) -> Subject:
    kind = "lm" if num_classes == VOCABULARY else "tagger"
    name = f"{cell}-{kind}-{width}x{num_layers}" + ("-packed" if packed else "")
    return Subject(
        family=cell,
        name=name,
        make_model=lambda: RecurrentModel(
            cell,
            width=width,
            num_layers=num_layers,
            num_classes=num_classes,
            both_ways=both_ways,
            packed=packed,
        ),
        make_batch=_make_batch(num_classes),
        loss=_tag,
    )


def _length(length: int) -> dict[str, int]:
    return {"length": length}


CONFIGURATIONS: list[Configuration] = [
    _subject("lstm", width=650).at(64, sizes=_length(128), precision="fp32", clip_norm=0.25, cap_gib=8),
    _subject("lstm", width=1024, num_layers=3).at(64, sizes=_length(256), precision="bf16", cap_gib=16),
    _subject("lstm", width=512, num_classes=50, both_ways=True).at(
        256, sizes=_length(256), precision="fp16", optimizer="adam", cap_gib=8
    ),
    _subject("lstm", width=512, num_classes=50, both_ways=True, packed=True).at(
        128, sizes=_length(256), precision="fp32"
    ),
    _subject("lstm", width=1024).at(
        32, sizes=_length(512), precision="pure-bf16", optimizer="sgd", accumulation=2
    ),
    _subject("gru", width=650).at(64, sizes=_length(128), precision="fp32", clip_norm=0.25, cap_gib=8),
    _subject("gru", width=1024, num_layers=3).at(64, sizes=_length(256), precision="bf16", cap_gib=16),
    _subject("gru", width=512, num_classes=50, both_ways=True).at(
        256, sizes=_length(256), precision="fp16", optimizer="adam"
    ),
    _subject("gru", width=1024).at(64, sizes=_length(256), precision="tf32", mode="evaluate"),
]
