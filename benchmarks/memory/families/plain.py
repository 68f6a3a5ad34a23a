"""Models of torch.nn alone: tables, and (held out) nn.TransformerEncoder and mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import Configuration, Subject, token_ids

VOCABULARY = 16000


class TableModel(nn.Module):
    """Embedded categories beside numbers, through wide linear layers with batch norm and dropout."""

    def __init__(self, *, width: int, depth: int, num_columns: int = 32, num_numbers: int = 64) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(1000, 16) for _ in range(num_columns)])
        num_in, layers = num_columns * 16 + num_numbers, []
        for _ in range(depth):
            layers += [nn.Linear(num_in, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2)]
            num_in = width
        self.body, self.head = nn.Sequential(*layers), nn.Linear(width, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        embedded = [embed(categories[:, column]) for column, embed in enumerate(self.embeddings)]
        scores: Tensor = self.head(self.body(torch.cat([*embedded, numbers], dim=1)))
        return scores.squeeze(1)


def _table(*, batch_size: int, rows: int) -> dict[str, Tensor]:
    """`rows` samples per unit of batch size: tables are trained in large batches."""
    num = batch_size * rows
    return {
        "categories": token_ids(num, 32, vocabulary=1000),
        "numbers": torch.randn(num, 64),
        "labels": torch.rand(num),
    }


def _fit_table(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["categories"], batch["numbers"]), batch["labels"])


class EncoderModel(nn.Module):
    """nn.TransformerEncoder with learned positions and one score per token."""

    def __init__(self, *, width: int, num_layers: int, num_heads: int, norm_first: bool) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(2048, width)
        layer = nn.TransformerEncoderLayer(
            width,
            num_heads,
            4 * width,
            dropout=0.1,
            batch_first=True,
            norm_first=norm_first,
            activation="gelu",
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, padding: Tensor | None) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.embedding(ids) + self.positions(positions)
        scores: Tensor = self.head(self.encoder(hidden, src_key_padding_mask=padding))
        return scores


def _tokens(*, batch_size: int, length: int) -> dict[str, Tensor]:
    padding = torch.zeros(batch_size, length, dtype=torch.bool)
    padding[:, -1] = True
    return {
        "ids": token_ids(batch_size, length, vocabulary=VOCABULARY),
        "padding": padding,
        "labels": token_ids(batch_size, length, vocabulary=VOCABULARY),
    }


def _unpadded(*, batch_size: int, length: int) -> dict[str, Tensor | None]:
    return {**_tokens(batch_size=batch_size, length=length), "padding": None}


def _score_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["ids"], batch["padding"])
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


class Experts(nn.Module):
    """Two of `num_experts` feed-forward networks per token; rows are gathered expert by expert."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
                for _ in range(num_experts)
            ]
        )

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            answer = expert(flat[rows]) * weights[rows, slots, None]
            result = result.index_add(0, rows, answer.to(result.dtype))
        return result.view_as(hidden)


class CapacityExperts(nn.Module):
    """The same with a fixed number of places per expert: the best tokens of each expert get them."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.rise = nn.Parameter(torch.randn(num_experts, width, 4 * width) * 0.02)
        self.fall = nn.Parameter(torch.randn(num_experts, 4 * width, width) * 0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        shares = self.router(flat).softmax(-1)
        weights, rows = shares.topk(max(1, 2 * len(flat) // shares.shape[1]), dim=0)
        gathered = flat[rows.T]
        answers = torch.bmm(F.silu(torch.bmm(gathered, self.rise)), self.fall) * weights.T.unsqueeze(-1)
        result = torch.zeros_like(flat).index_add(0, rows.T.flatten(), answers.flatten(0, 1).to(flat.dtype))
        return result.view_as(hidden)


class MixtureBlock(nn.Module):
    def __init__(self, width: int, experts: nn.Module) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.experts = experts

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.before(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        result: Tensor = hidden + self.experts(self.between(hidden))
        return result


class MixtureModel(nn.Module):
    def __init__(self, *, width: int, num_layers: int, num_experts: int, capacity: bool) -> None:
        super().__init__()
        make: Any = CapacityExperts if capacity else Experts
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(
            *[MixtureBlock(width, make(width, num_experts)) for _ in range(num_layers)]
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, padding: Tensor | None) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.embedding(ids)))
        return scores


def _length(length: int) -> dict[str, int]:
    return {"length": length}


def _tables() -> list[Configuration]:
    def subject(*, width: int, depth: int) -> Subject:
        return Subject(
            family="table",
            name=f"table-{width}x{depth}",
            make_model=lambda: TableModel(width=width, depth=depth),
            make_batch=_table,
            loss=_fit_table,
        )

    return [
        subject(width=1024, depth=6).at(32, sizes={"rows": 512}, precision="fp32", cap_gib=4),
        subject(width=2048, depth=8).at(
            64, sizes={"rows": 512}, precision="bf16", optimizer="adam", cap_gib=8
        ),
        subject(width=4096, depth=6).at(
            128, sizes={"rows": 256}, precision="fp16", clip_norm=1.0, optimizer="sgd-momentum"
        ),
        subject(width=2048, depth=8).at(
            512, sizes={"rows": 64}, precision="tf32", optimizer="adamw-fused", accumulation=2
        ),
    ]


def _encoders() -> list[Configuration]:
    def subject(name: str, *, make_batch: Any = _tokens, **shape: Any) -> Subject:
        return Subject(
            family="transformer-encoder",
            name=f"encoder-{name}",
            make_model=lambda: EncoderModel(**shape),
            make_batch=make_batch,
            loss=_score_tokens,
        )

    small = {"width": 512, "num_layers": 6, "num_heads": 8, "norm_first": False}
    base = {"width": 768, "num_layers": 12, "num_heads": 12, "norm_first": True}
    return [
        subject("small", **small).at(64, sizes=_length(256), precision="fp32", cap_gib=12),
        subject("base", **base).at(32, sizes=_length(512), precision="bf16", clip_norm=1.0, cap_gib=16),
        subject("base-unpadded", make_batch=_unpadded, **base).at(16, sizes=_length(512), precision="fp16"),
        subject("small", **small).at(128, sizes=_length(512), precision="bf16", mode="evaluate"),
    ]


def _mixtures() -> list[Configuration]:
    def subject(name: str, *, capacity: bool, width: int = 512) -> Subject:
        return Subject(
            family="mixture",
            name=f"mixture-{name}",
            make_model=lambda: MixtureModel(width=width, num_layers=6, num_experts=8, capacity=capacity),
            make_batch=_unpadded,
            loss=_score_tokens,
        )

    return [
        subject("gathered", capacity=False).at(32, sizes=_length(256), precision="fp32"),
        subject("gathered", capacity=False).at(64, sizes=_length(256), precision="bf16", clip_norm=1.0),
        subject("capacity", capacity=True).at(64, sizes=_length(256), precision="bf16", cap_gib=12),
        subject("capacity", capacity=True, width=768).at(
            16, sizes=_length(512), precision="tf32", optimizer="adamw-fused"
        ),
    ]


CONFIGURATIONS = [*_tables(), *_encoders(), *_mixtures()]
