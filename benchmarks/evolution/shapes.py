"""Models of published shapes with random weights: speed depends on the shape, not on what they know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.multiplex.models.decoder import Attention, Decoder, DecoderBlock, Mlp, Norm, Projection


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The figures of a model's config."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    vocabulary: int
    biased: bool = False
    head_norms: bool = False
    tied: bool = True


SHAPES = {
    "tiny": Shape(
        width=96, layers=2, heads=6, kv_heads=2, head_width=32, inner=160, vocabulary=300, biased=True
    ),
    "small": Shape(width=256, layers=4, heads=4, kv_heads=2, head_width=64, inner=704, vocabulary=2048),
    "smollm2-135m": Shape(
        width=576, layers=30, heads=9, kv_heads=3, head_width=64, inner=1536, vocabulary=49152
    ),
    "qwen2.5-1.5b": Shape(
        width=1536,
        layers=28,
        heads=12,
        kv_heads=2,
        head_width=128,
        inner=8960,
        vocabulary=151936,
        biased=True,
    ),
    "qwen3-4b": Shape(
        width=2560,
        layers=36,
        heads=32,
        kv_heads=8,
        head_width=128,
        inner=9728,
        vocabulary=151936,
        head_norms=True,
    ),
    "llama-1.1b": Shape(
        width=2048, layers=16, heads=16, kv_heads=16, head_width=128, inner=5632, vocabulary=32000, tied=False
    ),
}


def transformers_model(shape: Shape, *, device: str, dtype: torch.dtype) -> Any:
    """A model of `shape` with random weights as transformers has it, for its own `generate`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_width,
        attention_bias=shape.biased,
        tie_word_embeddings=shape.tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model.requires_grad_(False)


def build(
    shape: Shape, *, device: str, dtype: torch.dtype, max_positions: int = 1024, seed: int = 0
) -> Decoder:
    """A decoder of `shape` with random weights, made where it will run."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, scale: float) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype, generator=generator).mul_(scale)

    def project(name: str, rows: int, columns: int, *, biased: bool = False) -> Projection:
        bias = normal(rows, scale=0.1) if biased else None
        return Projection(
            name=name, weight=normal(rows, columns, scale=columns**-0.5), bias=bias, parts=((name, rows),)
        )

    def norm(width: int) -> Norm:
        return Norm(weight=1 + normal(width, scale=0.1), bias=None, eps=1e-6, centred=False)

    frequencies = 10000.0 ** (-torch.arange(0, shape.head_width, 2, device=device) / shape.head_width)
    angles = torch.arange(max_positions, device=device)[:, None] * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    blocks = []
    for i in range(shape.layers):
        queries, kv = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        attention = Attention(
            qkv=project(f"layers.{i}.qkv", queries + 2 * kv, shape.width, biased=shape.biased),
            out=project(f"layers.{i}.out", shape.width, queries),
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_width=shape.head_width,
            scale=shape.head_width**-0.5,
            q_norm=norm(shape.head_width) if shape.head_norms else None,
            k_norm=norm(shape.head_width) if shape.head_norms else None,
            cos=cos,
            sin=sin,
            rotary_width=shape.head_width,
            window=None,
            softcap=None,
        )
        mlp = Mlp(
            up=project(f"layers.{i}.up", 2 * shape.inner, shape.width),
            down=project(f"layers.{i}.down", shape.width, shape.inner),
            activation="silu",
            gated=True,
        )
        blocks.append(
            DecoderBlock(
                attention_norm=norm(shape.width),
                attention=attention,
                attention_out_norm=None,
                mlp_norm=norm(shape.width),
                mlp=mlp,
                mlp_out_norm=None,
                parallel=False,
            )
        )
    embedding = normal(shape.vocabulary, shape.width, scale=1.0 if not shape.tied else shape.width**-0.5)
    head_weight = embedding if shape.tied else normal(shape.vocabulary, shape.width, scale=shape.width**-0.5)
    return Decoder(
        embedding=embedding,
        embedding_scale=None,
        positions=None,
        blocks=tuple(blocks),
        norm=norm(shape.width),
        head=Projection(name="head", weight=head_weight, bias=None, parts=(("head", shape.vocabulary),)),
        softcap=None,
        max_positions=max_positions,
    )
