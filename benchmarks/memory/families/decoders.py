"""Decoder language models: GPT-2, Llama with grouped queries, Qwen, and (held out) Gemma."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.memory.configuration import Configuration, Subject, own_loss, padding_mask, token_ids

GPT2: dict[str, dict[str, Any]] = {
    "small": {},
    "medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
}
LLAMA: dict[str, dict[str, Any]] = {
    "55m": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
    "125m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
    },
}
QWEN: dict[str, dict[str, Any]] = {
    "100m": {
        "vocab_size": 50304,
        "hidden_size": 640,
        "intermediate_size": 1920,
        "num_hidden_layers": 16,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "600m": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1500m": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
}
GEMMA: dict[str, dict[str, Any]] = {
    "90m": {
        "vocab_size": 32000,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
    },
    "1b": {
        "vocab_size": 131072,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
    },
}


def gpt2(shape: str, *, frozen: bool = False) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(**GPT2[shape]))
    if frozen:
        model.transformer.wpe.requires_grad_(False)
        for block in model.transformer.h[:6]:
            block.requires_grad_(False)
    return model


def llama(shape: str, *, key_value_heads: int = 4, **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **LLAMA[shape],
        num_key_value_heads=key_value_heads,
        vocab_size=32000,
        max_position_embeddings=4096,
        **options,
    )
    return LlamaForCausalLM(config)


def _qwen(shape: str) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**QWEN[shape], tie_word_embeddings=True))


def _gemma(shape: str) -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA[shape], sliding_window=512))


def plain_text(*, batch_size: int, length: int) -> dict[str, Tensor]:
    """Packed rows: every position is a token, no mask."""
    ids = token_ids(batch_size, length)
    return {"input_ids": ids, "labels": ids.clone()}


def padded_text(*, batch_size: int, length: int) -> dict[str, Tensor]:
    mask = padding_mask(batch_size, length)
    ids = token_ids(batch_size, length)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def prompts(*, batch_size: int, length: int) -> dict[str, Tensor]:
    """Left-padded, as for generation."""
    mask = padding_mask(batch_size, length).flip(1)
    return {"input_ids": token_ids(batch_size, length), "attention_mask": mask}


def _length(length: int) -> dict[str, int]:
    return {"length": length}


def _gpt2_configurations() -> list[Configuration]:
    def subject(shape: str, *, frozen: bool = False, make_batch: Any = plain_text) -> Subject:
        return Subject(
            family="gpt2",
            name=f"gpt2-{shape}" + ("-frozen6" if frozen else "") + ("-padded" * (make_batch is padded_text)),
            make_model=lambda: gpt2(shape, frozen=frozen),
            make_batch=make_batch,
            loss=own_loss,
        )

    return [
        subject("small").at(4, sizes=_length(1024), precision="fp32", cap_gib=16),
        subject("small").at(16, sizes=_length(1024), precision="bf16", clip_norm=1.0, cap_gib=24),
        subject("medium").at(16, sizes=_length(512), precision="bf16", checkpointing=True, accumulation=2),
        subject("large").at(2, sizes=_length(1024), precision="pure-bf16", optimizer="adamw-fused"),
        subject("small", make_batch=padded_text).at(8, sizes=_length(512), precision="fp16", cap_gib=12),
        subject("small", frozen=True).at(8, sizes=_length(768), precision="tf32", optimizer="sgd"),
        subject("medium", make_batch=prompts).at(
            32, sizes=_length(256), precision="bf16", mode="generate", new_tokens=48
        ),
    ]


def _llama_configurations() -> list[Configuration]:
    def subject(shape: str, *, make_batch: Any = plain_text, **options: Any) -> Subject:
        variant = "-padded" if make_batch is padded_text else ""
        variant += "-eager" if options.get("attn_implementation") == "eager" else ""
        return Subject(
            family="llama",
            name=f"llama-{shape}{variant}",
            make_model=lambda: llama(shape, **options),
            make_batch=make_batch,
            loss=own_loss,
        )

    return [
        subject("55m").at(32, sizes=_length(256), precision="fp32", optimizer="adamw-loop"),
        subject("125m").at(8, sizes=_length(2048), precision="bf16", clip_norm=1.0, cap_gib=24),
        subject("125m", make_batch=padded_text).at(16, sizes=_length(512), precision="bf16", cap_gib=12),
        subject("125m", attn_implementation="eager").at(4, sizes=_length(1024), precision="fp16"),
        subject("1b").at(4, sizes=_length(1024), precision="bf16", checkpointing=True, clip_norm=1.0),
        subject("1b").at(1, sizes=_length(2048), precision="pure-bf16", optimizer="adamw-fused", cap_gib=24),
        subject("1b", make_batch=prompts).at(
            16, sizes=_length(512), precision="pure-bf16", mode="generate", new_tokens=48
        ),
        subject("125m").at(16, sizes=_length(1024), precision="tf32", mode="evaluate"),
    ]


def _qwen_configurations() -> list[Configuration]:
    def subject(shape: str, *, make_batch: Any = plain_text) -> Subject:
        return Subject(
            family="qwen",
            name=f"qwen-{shape}",
            make_model=lambda: _qwen(shape),
            make_batch=make_batch,
            loss=own_loss,
        )

    return [
        subject("100m").at(8, sizes=_length(1024), precision="bf16", cap_gib=16),
        subject("100m").at(16, sizes=_length(384), precision="fp32", optimizer="sgd-momentum", cap_gib=16),
        subject("600m").at(4, sizes=_length(512), precision="fp16", clip_norm=0.5),
        subject("600m").at(8, sizes=_length(1024), precision="bf16", checkpointing=True, accumulation=2),
        subject("1500m").at(2, sizes=_length(1024), precision="pure-bf16", checkpointing=True),
    ]


def _gemma_configurations() -> list[Configuration]:
    def subject(shape: str, *, make_batch: Any = plain_text) -> Subject:
        return Subject(
            family="gemma",
            name=f"gemma-{shape}",
            make_model=lambda: _gemma(shape),
            make_batch=make_batch,
            loss=own_loss,
        )

    return [
        subject("90m").at(8, sizes=_length(1024), precision="bf16", cap_gib=16),
        subject("90m").at(8, sizes=_length(512), precision="fp32", clip_norm=1.0),
        subject("1b").at(2, sizes=_length(1024), precision="bf16", checkpointing=True, accumulation=2),
        subject("1b").at(1, sizes=_length(2048), precision="pure-bf16", optimizer="adamw-fused"),
        subject("1b", make_batch=prompts).at(
            8, sizes=_length(256), precision="pure-bf16", mode="generate", new_tokens=32
        ),
    ]


CONFIGURATIONS = [
    *_gpt2_configurations(),
    *_llama_configurations(),
    *_qwen_configurations(),
    *_gemma_configurations(),
]
