"""Tiny models, and settings under which they learn in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 16  # ten digits, a separator, and some that are never right


def tiny_llama(*, seed: int = 0, width: int = 32, layers: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model that a test can run thousands of rows of; its embedding is its head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().to(dtype).requires_grad_(False)


def save_tiny(folder: Path, *, seed: int = 0, layers: int = 1) -> Path:
    """A folder with a tiny model, without a tokenizer."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    tiny_llama(seed=seed, layers=layers).save_pretrained(folder)
    return folder


def tiny_tokenizer() -> Any:
    """Characters of questions about small numbers, within the vocabulary of the tiny model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {character: number for number, character in enumerate("0123456789\n#? ~")}
    made = Tokenizer(models.WordLevel(words, unk_token="~"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="~")


def save_tiny_texts(folder: Path, *, seed: int = 0) -> Path:
    """A folder with a tiny model that reads and writes texts."""
    tiny_tokenizer().save_pretrained(save_tiny(folder, seed=seed))
    return folder


def tiny_settings(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """A run of a second: four epochs of sixteen members on two-digit copies."""
    return {
        "model": str(model),
        "out": str(out),
        "task": "digit-copy",
        "task_options": {"length": 2, "token_ids": True},
        "population": 16,
        "prompts": 4,
        "epochs": 4,
        "sigma": 0.1,
        "lr": 1.0,
        "rows": 16,
        "evaluate_every": 2,
        "evaluate_prompts": 8,
        "checkpoint_every": 2,
        "cosine_every": 1,
        "save_model": False,
        **changes,
    }


def small_net(*, seed: int = 0) -> nn.Sequential:
    """A module that is no language model, with every kind of parameter that takes noise."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 20), nn.LayerNorm(20), nn.Tanh(), nn.Linear(20, 3))


def member_delta(es: Any, name: str, member: int) -> torch.Tensor:
    """What a member adds to the weight `name`, materialised."""
    variant, sign = es.member(member)
    factors = es._noise.factors(name, variants=range(variant, variant + 1), epoch=es.noise_epoch)
    delta: torch.Tensor = factors.delta(0, sign=sign)
    return delta
