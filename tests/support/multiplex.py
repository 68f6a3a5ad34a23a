"""Tiny random models of every family that `multiplex` reads, and plain references for what they compute."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.multiplex.decode.steppers import SlotState
from flatout.multiplex.factors import Factors
from flatout.multiplex.models.decoder import Attention, Decoder, Norm, Projection
from flatout.multiplex.rows import Rows, VariantRange

# Tiny random models of every family that `multiplex` reads, and what Hugging Face says of them

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
        {
            **_WINDOWED,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",  # SDPA leaves the caps out, and older transformers choose it
        },
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
    ids = torch.tensor([list(prompt)], device=model.device)
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


def ranges_of(sizes: Sequence[int]) -> tuple[VariantRange, ...]:
    """Variants 0, 1, ... with so many tokens each, end to end."""
    stops = itertools.accumulate(sizes)
    return tuple(
        VariantRange(variant=v, start=stop - size, stop=stop)
        for v, (size, stop) in enumerate(zip(sizes, stops, strict=True))
    )


# The plainest decoder there is: one row, one variant, its weights materialised, float32, no cache


def normalise(x: Tensor, norm: Norm) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.float()


def weights(product: Projection, factors: dict[str, Factors], variant: int | None, sign: int) -> Tensor:
    weight = product.weight.float()
    if variant is None or product.name not in factors:
        return weight
    return weight + factors[product.name].delta(variant, sign=sign)


def rotated(x: Tensor, attention: Attention) -> Tensor:
    assert attention.cos is not None and attention.sin is not None
    cos, sin = attention.cos[: x.shape[1]].float(), attention.sin[: x.shape[1]].float()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def logits_of(
    decoder: Decoder, ids: Tensor, factors: dict[str, Factors], variant: int | None, sign: int = 1
) -> Tensor:
    """Logits [tokens, vocabulary] of one row."""
    x = decoder.embedding[ids].float()
    tokens = len(ids)
    for block in decoder.blocks:
        attention = block.attention
        heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_width
        joined = normalise(x, block.attention_norm) @ weights(attention.qkv, factors, variant, sign).T
        if attention.qkv.bias is not None:
            joined = joined + attention.qkv.bias.float()
        q, k, v = joined.view(tokens, -1, width).transpose(0, 1).split([heads, kv_heads, kv_heads])
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = normalise(q, attention.q_norm), normalise(k, attention.k_norm)
        q, k = rotated(q, attention), rotated(k, attention)
        k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * attention.scale
        scores = scores.masked_fill(~torch.ones_like(scores).tril().bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(tokens, -1)
        x = x + mixed @ weights(attention.out, factors, variant, sign).T
        up = normalise(x, block.mlp_norm) @ weights(block.mlp.up, factors, variant, sign).T
        gate, value = up.chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * value) @ weights(block.mlp.down, factors, variant, sign).T
    return normalise(x, decoder.norm) @ decoder.head.weight.float().T


# Tiny models that the hand-written step can run, and how far it is from the materialised weights

FUSIBLE = ("llama", "qwen2", "qwen3")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def fusible_model(family: str = "llama", **changes: Any) -> Any:
    """Heads of width 32: the smallest that the step takes."""
    return tiny_model(family, **{**SIZES, **changes})


def integer_factors(
    decoder: Decoder, *, num_variants: int, rank: int, scale: float = 5e-5
) -> dict[str, Factors]:
    """Int8 factors of every product, large enough to change the logits by a good part."""
    generator = torch.Generator().manual_seed(rank)

    def drawn(width: int) -> Tensor:
        shape = (num_variants, rank, width)
        return torch.randint(-60, 60, shape, dtype=torch.int8, generator=generator).to(decoder.device)

    return {
        name: Factors(drawn(one.weight.shape[1]), drawn(one.weight.shape[0]), scale)
        for name, one in decoder.projections().items()
    }


def largest_error(
    decoder: Decoder, factors: dict[str, Factors], rows: Rows, *, tile: int = 1, num_steps: int = 2
) -> float:
    """Prefill prompts of different lengths, decode greedily, and compare every row's logits with those of its
    materialised weights: the largest relative error of a row."""
    from flatout.multiplex.decode.fused import why_not
    from flatout.multiplex.kernels.step import DecodeStep

    assert why_not(decoder, factors) is None
    state = SlotState.empty(decoder, slots=len(rows), max_tokens=20, eos=())
    state.tables.write(range(len(rows)), rows)
    state.cache.storage.fill_(7.0)  # what a row has not written must not matter
    step = DecodeStep(decoder, state, factors=factors, tile=tile)
    ids = torch.randint(0, VOCABULARY, (len(rows), 4), generator=torch.Generator().manual_seed(0)).to(
        decoder.device
    )
    lengths = [4 - row % 3 for row in range(len(rows))]
    step.prefill(ids, torch.arange(len(rows), device=decoder.device))
    ends = torch.tensor(lengths, device=decoder.device) - 1
    state.token.copy_(ids.gather(1, ends[:, None])[:, 0])
    state.position.copy_(ends)
    state.alive.fill_(True)
    state.limit.fill_(100)
    texts = [ids[row, :length].tolist() for row, length in enumerate(lengths)]
    found = []
    for _ in range(num_steps):
        logits = step.decode(state.token, state.position).clone()
        found.append(logits.float())
        step.best(logits)
        step.append()
        assert torch.equal(state.token, logits.argmax(-1))
        for text, token in zip(texts, state.token.tolist(), strict=True):
            text.append(token)
    errors = []
    for row, (text, variant) in enumerate(zip(texts, rows.variants, strict=True)):
        sign = 1 if rows.signs is None else rows.signs[row]
        whole = logits_of(decoder, torch.tensor(text[:-1], device=decoder.device), factors, variant, sign)
        ours, wanted = torch.stack([step[row] for step in found]), whole[-num_steps:]
        errors.append(float((ours - wanted).norm() / wanted.norm()))
    return max(errors)
