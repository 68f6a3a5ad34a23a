"""Steps of other sets with `torch.compile` around the model: what a compiled step takes beside an eager one.

The labels end their names in `-compiled`; take `-compiled` away to find the eager step in its own set.

    python benchmarks/memory/first_look.py --set compiled --predict --save        # anywhere
    python benchmarks/memory/measure.py --set compiled --child-seconds 240 --out measured.json   # on a GPU
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.memory.configuration import Configuration
from benchmarks.memory.families import (
    convolutions,
    decoders,
    image_models,
    plain,
    second_images,
    second_plain,
    text_encoders,
    unseen,
)
from benchmarks.memory.families.third import sequences

SUFFIX = "-compiled"
MODULES = (
    text_encoders,
    decoders,
    image_models,
    convolutions,
    plain,
    unseen,
    second_images,
    second_plain,
    sequences,
)
LABELS = (
    "bert-mlm-base/batch32/length256/fp16/clip/adamw",
    "bert-mlm-tiny/batch64/length128/fp32/adamw",
    "gpt2-small/batch4/length1024/fp32/adamw",
    "gpt2-small/batch16/length1024/bf16/clip/adamw",
    "llama-125m/batch8/length2048/bf16/clip/adamw",
    "vit-base/batch64/image224/bf16/adamw",
    "convnext-tiny/batch32/image224/fp32/adamw",
    "resnet50/batch64/image224/fp32/sgd-momentum",
    "resnet50/batch128/image224/bf16/adamw",
    "unet-diffusion/batch32/image64/fp32/clip/adamw",
    "encoder-small/batch64/length256/fp32/adamw",
    "mixer/batch64/image224/fp32/adamw",
    "diffusion-transformer/batch64/latent32/bf16/adamw-fused",
    "points/batch64/points2048/tf32/adamw-loop",
    "linear-attention/batch16/length1024/bf16/adamw",
    "relative-places/batch16/length384/fp32/adamw",
)


def compiled(configuration: Configuration) -> Configuration:
    """The same step of the compiled model."""
    job = configuration.job
    compiling = dataclasses.replace(job, name=f"{job.name}{SUFFIX}", make_model=_compiling(job.make_model))
    return dataclasses.replace(configuration, family=f"{configuration.family}{SUFFIX}", job=compiling)


def _compiling(make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = torch.compile(make_model())
        return model

    return make


def _eager() -> dict[str, Configuration]:
    return {each.label: each for module in MODULES for each in module.CONFIGURATIONS}


CONFIGURATIONS: list[Configuration] = [compiled(_eager()[label]) for label in LABELS]
