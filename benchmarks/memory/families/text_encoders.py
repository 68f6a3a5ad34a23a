"""BERT-shaped encoders: masked-language training, classification, and contrastive sentence pairs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import Configuration, Subject, own_loss, padding_mask, token_ids

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "mini": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "base": {},
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}


def bert_config(shape: str, **options: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(**SHAPES[shape], **options)


def _masked(shape: str) -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(bert_config(shape))


def _classifier(shape: str, *, frozen_layers: int = 0) -> nn.Module:
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(bert_config(shape, num_labels=5))
    if frozen_layers:
        model.bert.embeddings.requires_grad_(False)
        for layer in model.bert.encoder.layer[:frozen_layers]:
            layer.requires_grad_(False)
    return model


def mini_encoder(*, eager: bool = False) -> nn.Module:
    """The shape of MiniLM-L6, without the pooler."""
    from transformers import BertModel

    options = {"attn_implementation": "eager"} if eager else {}
    return BertModel(bert_config("mini", **options), add_pooling_layer=False)


def _masked_batch(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = token_ids(batch_size, length)
    labels = torch.where(torch.rand(batch_size, length) < 0.15, ids, -100)
    return {"input_ids": ids, "attention_mask": padding_mask(batch_size, length), "labels": labels}


def _classifier_batch(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "input_ids": token_ids(batch_size, length),
        "attention_mask": padding_mask(batch_size, length),
        "labels": torch.randint(0, 5, (batch_size,)),
    }


class Towers(nn.Module):
    """A query and a passage encoder, shared or apart; rows of the batch are each other's negatives."""

    def __init__(self, *, shared: bool, eager: bool = False) -> None:
        super().__init__()
        self.query = mini_encoder(eager=eager)
        self.passage = self.query if shared else mini_encoder(eager=eager)

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.query.gradient_checkpointing_enable(**options)
        if self.passage is not self.query:
            self.passage.gradient_checkpointing_enable(**options)

    def embed(self, encoder: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9), dim=-1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        queries = self.embed(self.query, batch["query_ids"], batch["query_mask"])
        passages = self.embed(self.passage, batch["passage_ids"], batch["passage_mask"])
        return queries @ passages.T / 0.05


def _pairs(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "query_ids": token_ids(batch_size, length),
        "query_mask": padding_mask(batch_size, length),
        "passage_ids": token_ids(batch_size, length),
        "passage_mask": padding_mask(batch_size, length),
        "labels": torch.arange(batch_size),
    }


def _contrast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch), batch["labels"])


def _length(length: int) -> dict[str, int]:
    return {"length": length}


def _bert() -> list[Configuration]:
    def masked(shape: str) -> Subject:
        return Subject(
            family="bert",
            name=f"bert-mlm-{shape}",
            make_model=lambda: _masked(shape),
            make_batch=_masked_batch,
            loss=own_loss,
        )

    def classifier(shape: str, *, frozen_layers: int = 0) -> Subject:
        name = f"bert-classifier-{shape}" + (f"-frozen{frozen_layers}" if frozen_layers else "")
        return Subject(
            family="bert",
            name=name,
            make_model=lambda: _classifier(shape, frozen_layers=frozen_layers),
            make_batch=_classifier_batch,
            loss=own_loss,
        )

    return [
        masked("tiny").at(64, sizes=_length(128), precision="fp32"),
        masked("base").at(32, sizes=_length(256), precision="fp16", clip_norm=1.0, cap_gib=12),
        masked("base").at(64, sizes=_length(512), precision="bf16", checkpointing=True, cap_gib=16),
        masked("large").at(8, sizes=_length(512), precision="tf32", optimizer="adamw-fused"),
        classifier("base").at(64, sizes=_length(128), precision="bf16", cap_gib=8),
        classifier("base", frozen_layers=8).at(32, sizes=_length(384), precision="fp32", optimizer="adam"),
        classifier("large").at(128, sizes=_length(128), precision="pure-bf16", accumulation=2),
        classifier("base").at(256, sizes=_length(512), precision="bf16", mode="evaluate"),
    ]


def _contrastive() -> list[Configuration]:
    def towers(name: str, *, shared: bool, eager: bool = False) -> Subject:
        return Subject(
            family="contrastive",
            name=name,
            make_model=lambda: Towers(shared=shared, eager=eager),
            make_batch=_pairs,
            loss=_contrast,
        )

    shared, apart = towers("minilm-shared", shared=True), towers("minilm-two-towers", shared=False)
    eager = towers("minilm-shared-eager", shared=True, eager=True)
    return [
        shared.at(128, sizes=_length(128), precision="fp32", cap_gib=8),
        shared.at(512, sizes=_length(128), precision="bf16", clip_norm=1.0, cap_gib=16),
        apart.at(256, sizes=_length(256), precision="fp16", checkpointing=True, cap_gib=8),
        apart.at(64, sizes=_length(512), precision="tf32", optimizer="sgd-momentum"),
        eager.at(64, sizes=_length(256), precision="bf16", accumulation=4),
    ]


CONFIGURATIONS = [*_bert(), *_contrastive()]
