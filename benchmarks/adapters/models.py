"""The shapes that are raced, and one adapter as plain PyTorch writes it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.engines.adapters.lora.bank import AdapterSpec

RANKS = (16, 24, 32, 32, 32)
NAMES = ("sentiment", "qa", "summarisation", "code", "translation")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An encoder by its sizes."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    roberta: bool


SHAPES = {
    "roberta-base": Shape(layers=12, width=768, heads=12, vocabulary=50265, roberta=True),
    "minilm": Shape(layers=6, width=384, heads=12, vocabulary=30522, roberta=False),
    "small": Shape(layers=2, width=128, heads=4, vocabulary=2000, roberta=False),
}


def build(name: str, *, folder: Path | None, device: str, dtype: torch.dtype) -> Any:
    """An encoder with random weights, or the real ones of `folder`."""
    if folder is not None:
        from transformers import AutoModel

        model = AutoModel.from_pretrained(str(folder), local_files_only=True, add_pooling_layer=False)
        return model.to(device, dtype).eval().requires_grad_(False)
    from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

    shape = SHAPES[name]
    sizes = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": 4 * shape.width,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 514,
    }
    torch.manual_seed(0)
    with torch.device(device):
        if shape.roberta:
            model = RobertaModel(RobertaConfig(**sizes, pad_token_id=1), add_pooling_layer=False)
        else:
            model = BertModel(BertConfig(**sizes), add_pooling_layer=False)
    return model.to(dtype).eval().requires_grad_(False)


def specs(*, dropout: float = 0.0) -> list[AdapterSpec]:
    """Five adapters of mixed ranks on the six linear maps of every layer."""
    return [
        AdapterSpec(name=name, rank=rank, dropout=dropout) for name, rank in zip(NAMES, RANKS, strict=True)
    ]


class LoraLinear(nn.Module):
    """A frozen linear map with one adapter, as one writes it: float32 factors, cast where they are used."""

    def __init__(self, base: nn.Linear, *, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.base, self.scale, self.dropout = base, scale, dropout
        device = base.weight.device
        self.a = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.dropout(x, self.dropout) if self.dropout else x
        low = F.linear(inside, self.a.to(x.dtype))
        y: Tensor = self.base(x) + F.linear(low, self.b.to(x.dtype)) * self.scale
        return y


def shell(model: Any) -> Any:
    """The model once more, over the same weights: an arm may change its modules."""
    return copy.deepcopy(model, {id(one): one for one in (*model.parameters(), *model.buffers())})


def with_one_adapter(model: Any, spec: AdapterSpec) -> Any:
    """The model with one adapter."""
    own = shell(model)
    for name, module in list(own.named_modules()):
        if type(module) is nn.Linear and spec.matches(name):
            parent, _, last = name.rpartition(".")
            changed = LoraLinear(module, rank=spec.rank, scale=spec.scale, dropout=spec.dropout)
            setattr(own.get_submodule(parent), last, changed)
    return own
