"""Tiny random models of every family that `multiplex` reads, and what Hugging Face says of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.multiplex.decoder import Decoder
from flatout.multiplex.factors import Factors

VOCABULARY = 97
POSITIONS = 256

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 16}
_WINDOWED = {**_GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 24}
_GPT2 = {
    **{name: _SIZES[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name -> (class stem, class of the model, arguments of the config)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "smollm": ("LlamaConfig", "LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    "llama-biased": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_GROUPED, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-rope": ("LlamaConfig", "LlamaForCausalLM", {**_GROUPED, "rope_parameters": _LLAMA3_ROPE}),
    "yarn-rope": ("LlamaConfig", "LlamaForCausalLM", {**_GROUPED, "rope_parameters": _YARN_ROPE}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GROUPED),
    "qwen2-windowed": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 16}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _SIZES),
    "gpt-neox-serial": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**_SIZES, "use_parallel_residual": False, "attention_bias": False},
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _GEMMA),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_WINDOWED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_WINDOWED, "sliding_window_pattern": 2}),
}


def tiny_model(family: str = "llama", **changes: Any) -> Any:
    """A model with random weights large enough that its tokens differ from one another."""
    import transformers

    config_name, model_name, arguments = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**{**arguments, **changes}))
    tokens = model.get_input_embeddings().weight  # small, or a tied head would only repeat the last token
    for parameter in model.parameters():
        size = 0.02 if parameter is tokens else 0.1 if parameter.ndim == 1 else 0.2
        parameter.data.copy_(parameter.data.round() + torch.randn_like(parameter) * size)
    return model.eval()


@functools.cache
def shared_model(family: str = "llama") -> Any:
    """The same, made once for all tests that only read it."""
    return tiny_model(family)


def prompts_of(lengths: Sequence[int], *, seed: int = 1) -> list[tuple[int, ...]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()) for n in lengths]


@torch.no_grad()
def reference_tokens(model: Any, prompt: Sequence[int], *, max_new_tokens: int) -> tuple[int, ...]:
    """What `model.generate` continues one prompt with, greedily."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    return tuple(out[0, len(prompt) :].tolist())


@torch.no_grad()
def reference_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Logits [tokens, vocabulary] of one text."""
    logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits


def random_factors(
    decoder: Decoder, *, num_variants: int, rank: int = 2, scale: float = 0.02, seed: int = 2
) -> dict[str, Factors]:
    """Factors of every product, large enough to change the tokens."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(width: int) -> Tensor:
        return torch.randn(num_variants, rank, width, generator=generator).to(decoder.dtype)

    return {
        name: Factors(drawn(one.weight.shape[1]), drawn(one.weight.shape[0]), scale)
        for name, one in decoder.projections().items()
    }
