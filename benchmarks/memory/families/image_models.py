"""Image classifiers of transformers: vision transformers and ConvNeXt."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.memory.configuration import Configuration, Subject, image_batch, image_loss

VIT: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768},
    "base": {},
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
CONVNEXT: dict[str, dict[str, Any]] = {
    "tiny": {},
    "base": {"hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 27, 3]},
}


def _vit(shape: str, *, image: int, frozen: bool = False) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(**VIT[shape], image_size=image, num_labels=1000))
    if frozen:
        model.vit.requires_grad_(False)
    return model


def _convnext(shape: str) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(**CONVNEXT[shape], num_labels=1000))


def _image(image: int) -> dict[str, int]:
    return {"image": image}


def _vit_configurations() -> list[Configuration]:
    def subject(shape: str, *, image: int = 224, frozen: bool = False) -> Subject:
        return Subject(
            family="vit",
            name=f"vit-{shape}" + ("-frozen" if frozen else ""),
            make_model=lambda: _vit(shape, image=image, frozen=frozen),
            make_batch=image_batch,
            loss=image_loss,
        )

    return [
        subject("tiny").at(256, sizes=_image(224), precision="fp32", cap_gib=8),
        subject("base").at(64, sizes=_image(224), precision="bf16", cap_gib=12),
        subject("large", image=384).at(16, sizes=_image(384), precision="fp16", checkpointing=True),
        subject("base", frozen=True).at(256, sizes=_image(224), precision="bf16", optimizer="sgd-momentum"),
        subject("large").at(256, sizes=_image(224), precision="pure-bf16", mode="evaluate"),
    ]


def _convnext_configurations() -> list[Configuration]:
    def subject(shape: str) -> Subject:
        return Subject(
            family="convnext",
            name=f"convnext-{shape}",
            make_model=lambda: _convnext(shape),
            make_batch=image_batch,
            loss=image_loss,
        )

    return [
        subject("tiny").at(32, sizes=_image(224), precision="fp32", cap_gib=8),
        subject("tiny").at(128, sizes=_image(224), precision="bf16", clip_norm=1.0, cap_gib=16),
        subject("base").at(32, sizes=_image(224), precision="fp16", accumulation=2),
        subject("base").at(16, sizes=_image(288), precision="tf32", optimizer="sgd-momentum"),
    ]


CONFIGURATIONS = [*_vit_configurations(), *_convnext_configurations()]
