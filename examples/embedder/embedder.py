"""The embedder: an encoder per channel of text, a mixture of experts over all of them, a vector per industry.

The encoders are frozen; low-rank adapters on their linears, the experts and the projection are what learns.
A step embeds three groups of rows: the anchors, their positives and their negatives, so the rows of a
micro-batch are batch_size × (1 + n_positives + n_negatives), and every row passes four encoders.

Shapes: B anchors, P positives and N negatives of each, R rows, C channels, L tokens, W width of an encoder,
D = C·W what the experts see, E experts, K experts per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from industries import CHANNELS, Texts
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import BertConfig, BertModel

TARGETS = {
    "attention": r"encoder\.layer\.\d+\.attention\.(self\.(query|key|value)|output\.dense)",
    "all": r"encoder\.layer\.\d+\..*(query|key|value|dense)",
}


class Experts(nn.Module):
    """Each row goes to the `top_k` experts its gate likes best, weighted by how much."""

    def __init__(self, width: int, *, num_experts: int, top_k: int, hidden_dim: int) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise SystemExit(f"model.moe.top_k is {top_k}; there are {num_experts} experts")
        self.top_k = top_k
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, width))
            for _ in range(num_experts)
        )

    def forward(self, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture, and a number: 1 when all experts are used evenly, more when they are not."""
        share_RE = self.gate(x_RD).softmax(-1)
        weight_RK, expert_RK = share_RE.topk(self.top_k, dim=-1)
        weight_RK = weight_RK / weight_RK.sum(-1, keepdim=True)
        mixed_RD = torch.zeros_like(x_RD)
        for number, expert in enumerate(self.experts):
            # How many rows an expert gets is known only once the gate has spoken.
            row, slot = (expert_RK == number).nonzero(as_tuple=True)
            answer = expert(x_RD[row]) * weight_RK[row, slot, None]
            mixed_RD = mixed_RD.index_add(0, row, answer.to(mixed_RD.dtype))
        used_E = F.one_hot(expert_RK, len(self.experts)).to(share_RE.dtype).mean((0, 1))
        return mixed_RD, len(self.experts) * (used_E * share_RE.mean(0)).sum()


class Embedder(nn.Module):
    """Texts in, unit vectors out."""

    def __init__(self, settings: Mapping[str, Any], *, weights: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        model, width = settings["model"], int(settings["model"]["encoder"]["width"])
        self.encoders = nn.ModuleList(_encoder(model, weights=weights) for _ in CHANNELS)
        moe = model["moe"]
        self.experts = Experts(
            len(CHANNELS) * width,
            num_experts=int(moe["num_experts"]),
            top_k=int(moe["top_k"]),
            hidden_dim=int(moe["hidden_dim"]),
        )
        self.projection = nn.Linear(len(CHANNELS) * width, int(model["embedding_dim"]))
        self.load_balancing = float(moe["load_balancing"])
        self.temperature = float(settings["training"]["temperature"])

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Named and called as in transformers, so that tools can switch it on from outside."""
        for encoder in self.encoders:
            # transformers 5.23 renamed the method, and warns at the old name.
            enable = getattr(
                encoder, "activation_checkpointing_enable", encoder.gradient_checkpointing_enable
            )
            enable(gradient_checkpointing_kwargs)

    def forward(self, texts: Texts) -> tuple[Tensor, Tensor]:
        """Embeddings of the rows, and how unevenly the experts were used for them."""
        pooled = []
        for channel, encoder in enumerate(self.encoders):
            mask_RL = texts["attention_mask"][:, channel]
            hidden_RLW = encoder(
                input_ids=texts["input_ids"][:, channel], attention_mask=mask_RL
            ).last_hidden_state
            kept_RL1 = mask_RL.unsqueeze(-1).to(hidden_RLW.dtype)
            pooled.append((hidden_RLW * kept_RL1).sum(1) / kept_RL1.sum(1).clamp(min=1))
        x_RD = torch.cat(pooled, dim=-1)
        mixed_RD, unevenness = self.experts(x_RD)
        return F.normalize(self.projection(x_RD + mixed_RD).float(), dim=-1), unevenness


def step_loss(model: Embedder, batch: Mapping[str, Texts]) -> Tensor:
    """The loss of one micro-batch, by three forwards."""
    (anchor_BD, uneven_a), (positive_RD, uneven_p), (negative_RD, uneven_n) = (
        model(batch[group]) for group in ("anchor", "positives", "negatives")
    )
    contrast = contrastive_loss(
        anchor_BD,
        positive_RD.unflatten(0, (len(anchor_BD), -1)),
        negative_RD.unflatten(0, (len(anchor_BD), -1)),
        temperature=model.temperature,
    )
    return contrast + model.load_balancing * (uneven_a + uneven_p + uneven_n) / 3


def contrastive_loss(
    anchor_BD: Tensor, positive_BPD: Tensor, negative_BND: Tensor, *, temperature: float
) -> Tensor:
    """InfoNCE of every positive against all negatives of its anchor, averaged."""
    positive_BP = torch.einsum("bd,bpd->bp", anchor_BD, positive_BPD).float() / temperature
    negative_BN = torch.einsum("bd,bnd->bn", anchor_BD, negative_BND).float() / temperature
    # -log(e^p / (e^p + Σe^n)) = softplus(log Σe^n - p)
    return F.softplus(negative_BN.logsumexp(1, keepdim=True) - positive_BP).mean()


def make_optimizer(parameters: list[nn.Parameter], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    training = settings["training"]
    return torch.optim.AdamW(
        parameters, lr=float(training["learning_rate"]), weight_decay=float(training["weight_decay"])
    )


def _encoder(model: Mapping[str, Any], *, weights: Mapping[str, Tensor] | None) -> BertModel:
    shape, lora = model["encoder"], model["lora"]
    if lora["targets"] not in TARGETS:
        raise SystemExit(f"model.lora.targets is {lora['targets']!r}, none of {', '.join(TARGETS)}")
    encoder = BertModel(
        BertConfig(
            vocab_size=int(shape["vocabulary"]),
            hidden_size=int(shape["width"]),
            num_hidden_layers=int(shape["num_layers"]),
            num_attention_heads=int(shape["num_heads"]),
            intermediate_size=int(shape["intermediate"]),
            use_cache=False,
        )
    )
    if weights is not None:
        encoder.load_state_dict(weights)
    adapters = LoraConfig(
        r=int(lora["r"]),
        lora_alpha=int(lora["alpha"]),
        lora_dropout=float(lora["dropout"]),
        target_modules=TARGETS[lora["targets"]],
    )
    return inject_adapter_in_model(adapters, encoder)  # freezes what it adapts
