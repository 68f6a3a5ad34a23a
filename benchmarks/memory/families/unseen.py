"""Families that no rule of the estimator was made from before they were measured.

Speech, windows, graphs, image and text.  Their estimates were made and saved before the first of them was
measured; that first look is in `results/unseen-first-look_...`, and is the error to expect of a model that
nobody here has thought of.  Rules were made from them since, so that later estimates of them prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import (
    Configuration,
    Subject,
    image_batch,
    image_loss,
    own_loss,
    padding_mask,
    token_ids,
)


def _swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(SwinConfig(num_labels=1000))


def _efficientnet() -> nn.Module:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    shape = {"image_size": 224, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
    return EfficientNetForImageClassification(EfficientNetConfig(**shape, num_labels=1000))


def _segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    return SegformerForSemanticSegmentation(SegformerConfig(num_labels=150))


def _segmentation_batch(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(batch_size, 3, image, image),
        "labels": torch.randint(0, 150, (batch_size, image, image)),
    }


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    shape = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    wide = {"encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}
    return WhisperForConditionalGeneration(WhisperConfig(**shape, **heads, **wide))


def _speech_batch(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(batch_size, 80, 3000),
        "labels": token_ids(batch_size, length),
    }


def _wav2vec() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    quiet = {"mask_time_prob": 0.0, "layerdrop": 0.0}  # both would draw, and what is drawn has its own size
    return Wav2Vec2ForSequenceClassification(Wav2Vec2Config(num_hidden_layers=6, num_labels=10, **quiet))


def _wave_batch(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch_size, length), "labels": torch.randint(0, 10, (batch_size,))}


def _bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=50000, hidden_size=768, n_layer=12, n_head=12))


def _neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**shape, intermediate_size=3072))


def _text_batch(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = token_ids(batch_size, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _deberta() -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    shape = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072}
    relative = {"relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"]}
    return DebertaV2ForSequenceClassification(
        DebertaV2Config(**shape, **relative, vocab_size=32000, num_labels=3)
    )


def _pair_batch(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "input_ids": token_ids(batch_size, length),
        "attention_mask": padding_mask(batch_size, length),
        "labels": torch.randint(0, 3, (batch_size,)),
    }


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
    image = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
    return CLIPModel(CLIPConfig(text_config=text, vision_config={**image, "patch_size": 32}))


def _caption_batch(*, batch_size: int, length: int) -> dict[str, Tensor]:
    ids = token_ids(batch_size, length, vocabulary=49000)
    ids[:, -1] = 49407
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(batch_size, 3, 224, 224),
    }


def _clip_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


class Autoencoder(nn.Module):
    """Strided convolutions down to a latent, transposed ones up again."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [3, width, 2 * width, 4 * width]
        down = [
            nn.Sequential(nn.Conv2d(a, b, 4, stride=2, padding=1), nn.GroupNorm(8, b), nn.SiLU())
            for a, b in pairwise(widths)
        ]
        up = [
            nn.Sequential(nn.ConvTranspose2d(b, a, 4, stride=2, padding=1), nn.SiLU())
            for a, b in pairwise(widths[1:])
        ]
        self.down = nn.Sequential(*down, nn.Conv2d(widths[-1], 2 * width, 1))
        self.up = nn.Sequential(
            nn.Conv2d(width, widths[-1], 1), *reversed(up), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.down(images).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.up(latent), mean, spread


def _reconstruct(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    images = batch["pixel_values"]
    found, mean, spread = model(images)
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
    return F.mse_loss(found.float(), images) + divergence


class GraphNetwork(nn.Module):
    """Messages along edges, summed where they arrive."""

    def __init__(self, width: int = 512, num_layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(128, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 40)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden = self.first(nodes)
        for message, norm in zip(self.messages, self.norms, strict=True):
            sent = F.relu(message(torch.cat([hidden[edges[0]], hidden[edges[1]]], dim=-1)))
            hidden = norm(hidden + torch.zeros_like(hidden).index_add(0, edges[1], sent.to(hidden.dtype)))
        scores: Tensor = self.head(hidden)
        return scores


def _graph_batch(*, batch_size: int, nodes: int) -> dict[str, Tensor]:
    count = batch_size * nodes
    return {
        "nodes": torch.randn(count, 128),
        "edges": torch.randint(0, count, (2, 4 * count)),
        "labels": torch.randint(0, 40, (count,)),
    }


def _graph_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["nodes"], batch["edges"]), batch["labels"])


class Mixer(nn.Module):
    """Layers over positions and layers over channels, in turn."""

    def __init__(self, *, width: int = 512, num_patches: int = 196, num_layers: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.positions = nn.ModuleList(_two_layers(num_patches, 256) for _ in range(num_layers))
        self.channels = nn.ModuleList(_two_layers(width, 4 * width) for _ in range(num_layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = self.patches(pixel_values).flatten(2).transpose(1, 2)
        for positions, channels in zip(self.positions, self.channels, strict=True):
            hidden = hidden + positions(hidden.transpose(1, 2)).transpose(1, 2)
            hidden = hidden + channels(hidden)
        scores: Tensor = self.head(hidden.mean(dim=1))
        return scores


def _two_layers(width: int, inner: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, width)
    )


def _classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def _subject(
    family: str,
    make_model: Callable[[], nn.Module],
    make_batch: Callable[..., Any],
    loss: Callable[[nn.Module, Any], Tensor] = own_loss,
) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


SWIN = _subject("swin", _swin, image_batch, image_loss)
EFFICIENTNET = _subject("efficientnet", _efficientnet, image_batch, image_loss)
SEGFORMER = _subject("segformer", _segformer, _segmentation_batch)
WHISPER = _subject("whisper", _whisper, _speech_batch)
WAV2VEC = _subject("wav2vec", _wav2vec, _wave_batch)
BLOOM = _subject("bloom", _bloom, _text_batch)
NEOX = _subject("neox", _neox, _text_batch)
DEBERTA = _subject("deberta", _deberta, _pair_batch)
CLIP = _subject("clip", _clip, _caption_batch, _clip_loss)
AUTOENCODER = _subject("autoencoder", Autoencoder, image_batch, _reconstruct)
GRAPH = _subject("graph", GraphNetwork, _graph_batch, _graph_loss)
MIXER = _subject("mixer", Mixer, image_batch, _classify)

CONFIGURATIONS: list[Configuration] = [
    SWIN.at(32, sizes={"image": 224}, precision="bf16", cap_gib=8),
    WHISPER.at(32, sizes={"length": 96}, precision="fp32", cap_gib=8),
    WAV2VEC.at(32, sizes={"length": 32000}, precision="fp16", clip_norm=1.0, cap_gib=8),
    BLOOM.at(8, sizes={"length": 512}, precision="bf16", clip_norm=1.0, cap_gib=12),
    NEOX.at(8, sizes={"length": 1024}, precision="bf16", cap_gib=16),
    DEBERTA.at(16, sizes={"length": 256}, precision="fp32", cap_gib=8),
    CLIP.at(128, sizes={"length": 64}, precision="bf16", cap_gib=8),
    EFFICIENTNET.at(64, sizes={"image": 224}, precision="bf16", optimizer="sgd-momentum", cap_gib=8),
    SEGFORMER.at(16, sizes={"image": 256}, precision="bf16", cap_gib=8),
    AUTOENCODER.at(256, sizes={"image": 128}, precision="fp32", cap_gib=8),
    GRAPH.at(16, sizes={"nodes": 1000}, precision="tf32", cap_gib=8),
    MIXER.at(64, sizes={"image": 224}, precision="fp32", cap_gib=8),
    SWIN.at(128, sizes={"image": 224}, precision="fp16", checkpointing=True),
    WHISPER.at(64, sizes={"length": 64}, precision="bf16", accumulation=2),
    BLOOM.at(4, sizes={"length": 1024}, precision="fp16", checkpointing=True, optimizer="adamw-fused"),
    DEBERTA.at(32, sizes={"length": 128}, precision="fp16", clip_norm=1.0),
    CLIP.at(1024, sizes={"length": 32}, precision="tf32", mode="evaluate"),
    EFFICIENTNET.at(32, sizes={"image": 224}, precision="fp32"),
    AUTOENCODER.at(512, sizes={"image": 128}, precision="bf16", clip_norm=1.0),
    MIXER.at(256, sizes={"image": 224}, precision="bf16", optimizer="sgd"),
]
