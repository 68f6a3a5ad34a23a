"""Low-rank adapters on frozen models: through PEFT, and four encoders with hand-made ones.

The four encoders are a product-code embedder: each row has four texts, three forwards per step (anchor,
positive, negatives), adapters on every linear layer of four MiniLM encoders.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import Configuration, Subject, own_loss, padding_mask, token_ids
from benchmarks.memory.families.decoders import gpt2, llama, padded_text, plain_text
from benchmarks.memory.families.text_encoders import mini_encoder
from flatout.memory.jobs.job import Job

CHANNELS = 4
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "embedder"


def _with_adapters(base: nn.Module, *, rank: int, targets: list[str] | str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.05, target_modules=targets)
    return get_peft_model(base, config)


def _llama_adapters(shape: str, *, rank: int) -> nn.Module:
    return _with_adapters(llama(shape, use_cache=False), rank=rank, targets="all-linear")


def _gpt2_adapters(shape: str, *, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(gpt2(shape), config)


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, *, rank: int = 8) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(0.1)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.base(hidden) + 2.0 * self.up(self.down(self.dropout(hidden)))
        return result


def _adapted_encoder() -> nn.Module:
    encoder: Any = mini_encoder()
    encoder.requires_grad_(False)
    for module in list(encoder.encoder.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LowRank(child))
    return encoder  # type: ignore[no-any-return]


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleList([_adapted_encoder() for _ in range(CHANNELS)])
        self.project = nn.Sequential(nn.Linear(CHANNELS * 384, 1024), nn.ReLU(), nn.Linear(1024, 384))

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        for encoder in self.encoders:
            encoder.gradient_checkpointing_enable(**options)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        pooled = []
        for channel, encoder in enumerate(self.encoders):
            hidden = encoder(input_ids=ids[channel], attention_mask=mask[channel]).last_hidden_state
            weight = mask[channel].unsqueeze(-1).to(hidden.dtype)
            pooled.append((hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9))
        embedding: Tensor = self.project(torch.cat(pooled, dim=1))
        return embedding


def _triplets(*, batch_size: int, length: int, negatives: int) -> dict[str, Tensor]:
    batch = {}
    for name, rows in (
        ("anchor", batch_size),
        ("positive", batch_size),
        ("negative", batch_size * negatives),
    ):
        batch[f"{name}_ids"] = token_ids(CHANNELS, rows, length)
        batch[f"{name}_mask"] = padding_mask(rows, length).expand(CHANNELS, -1, -1).contiguous()
    return batch


def _rank_positive_first(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    anchor, positive, negative = (
        model(batch[f"{name}_ids"], batch[f"{name}_mask"]) for name in ("anchor", "positive", "negative")
    )
    negative = negative.view(anchor.shape[0], -1, anchor.shape[1])
    scores = torch.cat(
        [(anchor * positive).sum(-1, keepdim=True), torch.einsum("bd,bkd->bk", anchor, negative)], dim=1
    )
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))


def _length(length: int) -> dict[str, int]:
    return {"length": length}


def _peft() -> list[Configuration]:
    def on_llama(shape: str, *, rank: int, make_batch: Any = plain_text) -> Subject:
        return Subject(
            family="lora",
            name=f"lora{rank}-llama-{shape}" + ("-padded" if make_batch is padded_text else ""),
            make_model=lambda: _llama_adapters(shape, rank=rank),
            make_batch=make_batch,
            loss=own_loss,
        )

    on_gpt2 = Subject(
        family="lora",
        name="lora8-gpt2-medium",
        make_model=lambda: _gpt2_adapters("medium", rank=8),
        make_batch=plain_text,
        loss=own_loss,
    )
    return [
        on_llama("125m", rank=16).at(8, sizes=_length(1024), precision="bf16", cap_gib=12),
        on_llama("1b", rank=16).at(4, sizes=_length(1024), precision="pure-bf16", checkpointing=True),
        on_llama("1b", rank=64, make_batch=padded_text).at(
            2, sizes=_length(512), precision="bf16", clip_norm=1.0, optimizer="adamw-fused"
        ),
        on_gpt2.at(8, sizes=_length(512), precision="fp16", cap_gib=12),
        on_gpt2.at(16, sizes=_length(256), precision="fp32", accumulation=4, checkpointing=True),
    ]


def _embedder() -> list[Configuration]:
    subject = Subject(
        family="embedder",
        name="embedder",
        make_model=Embedder,
        make_batch=_triplets,
        loss=_rank_positive_first,
    )
    return [
        subject.at(8, sizes={"length": 256, "negatives": 8}, precision="fp16", checkpointing=True, cap_gib=8),
        subject.at(16, sizes={"length": 128, "negatives": 4}, precision="bf16", clip_norm=1.0),
        subject.at(4, sizes={"length": 128, "negatives": 8}, precision="fp32", accumulation=2),
    ]


@functools.cache
def _example() -> Job:
    """`examples/embedder`, as it plans itself: PEFT adapters, and rows routed to experts."""
    if str(EXAMPLE) not in sys.path:
        sys.path.append(str(EXAMPLE))
    settings = importlib.import_module("settings").read_settings(EXAMPLE / "conf", stage="03")
    job: Job = importlib.import_module("plan").build(settings)[0]
    return job


def _example_configurations() -> list[Configuration]:
    subject = Subject(
        family="embedder",
        name="embedder-example",
        make_model=lambda: _example().make_model(),
        make_batch=lambda **sizes: _example().make_batch(**sizes),
        loss=lambda model, batch: _example().loss(model, batch),
    )
    return [
        subject.at(
            4,
            sizes={"length": 512, "n_positives": 16, "n_negatives": 8},
            precision="fp16",
            checkpointing=True,
            accumulation=2,
            clip_norm=1.0,
            cap_gib=8,
        ),
        subject.at(
            2, sizes={"length": 256, "n_positives": 16, "n_negatives": 24}, precision="bf16", clip_norm=1.0
        ),
    ]


CONFIGURATIONS = [*_peft(), *_embedder(), *_example_configurations()]
