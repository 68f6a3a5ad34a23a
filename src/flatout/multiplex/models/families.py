"""Hugging Face models as a `Decoder`.

A family is read, never run: its modules give the weights, its config the constants, and its own rotary module
the table of angles at every position, so that a static scaling of them (llama3, linear, yarn) is the model's
own.  A scaling that depends on the length at hand (dynamic, longrope) has no such table and is refused.

Every weight is the model's own storage: training the model trains the Decoder, and a change of the Decoder's
weights is a change of the model.

Three layouts cover the families: Llama's (also SmolLM, Qwen2, Qwen3 and Gemma), GPT-2's and GPT-NeoX's.

Another package adds a family by an entry point: its name is the config's `model_type`, its object a function
that reads a model.  The functions below that have no underscore are there for it, and
`flatout.testing.model_families` has its tests.

    [project.entry-points."flatout.model_families"]
    starcoder2 = "my_package.starcoder2:read_starcoder2"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.ground.errors import BadInput
from flatout.ground.user_code import load_plugins
from flatout.multiplex.models.decoder import (
    Activation,
    Attention,
    Decoder,
    DecoderBlock,
    Mlp,
    Norm,
    Projection,
)
from flatout.multiplex.models.stacking import linear_of, stacked, transposed

if TYPE_CHECKING:
    from torch import Tensor, nn

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
STATIC_ROTARY = {"default", "linear", "llama3", "yarn"}
PLUGINS = "flatout.model_families"


def read_decoder(model: nn.Module | Decoder) -> Decoder:
    """Read `model` as a Decoder over its own storage; a Decoder is returned as it is.

    Move the model to its device and type first: if it moves afterwards, the Decoder keeps the old weights.
    """
    if isinstance(model, Decoder):
        return model
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(kind, str):
        raise BadInput(f"a {type(model).__name__} has no config.model_type", hint="give a Hugging Face model")
    known = FAMILIES if kind in FAMILIES else {**FAMILIES, **load_plugins(PLUGINS)}
    if kind not in known:
        raise BadInput(
            f"model_type {kind!r} is not a family that can be read",
            hint=f"supported: {', '.join(known)}; a package may add one by an entry point of {PLUGINS}",
        )
    decoder = known[kind](model)
    if not isinstance(decoder, Decoder):
        raise BadInput(f"the reader of {kind!r} gives a {type(decoder).__name__}", hint="return a Decoder")
    if not decoder.blocks:
        raise BadInput("the model has no layers", hint="num_hidden_layers of its config has to be 1 or more")
    return decoder


def _read_llama(model: nn.Module) -> Decoder:
    config: Any = model.config
    gemma = config.model_type.startswith("gemma")
    if getattr(config, "use_bidirectional_attention", False):
        raise BadInput("the model attends in both directions", hint="only causal models generate")
    body: Any = model.model
    tables: dict[str | None, tuple[Tensor, Tensor]] = {}
    blocks = []
    for index, layer in enumerate(body.layers):
        kind = config.layer_types[index] if config.model_type == "gemma3_text" else None
        if kind not in tables:
            tables[kind] = rotary_tables(
                body.rotary_emb, config, layer_type=kind, like=body.embed_tokens.weight
            )
        blocks.append(_llama_block(model, layer, f"model.layers.{index}", tables[kind], offset=gemma))
    return Decoder(
        embedding=body.embed_tokens.weight.detach(),
        embedding_scale=_gemma_scale(body.embed_tokens.weight) if gemma else None,
        blocks=tuple(blocks),
        norm=rms_norm(body.norm, offset=gemma),
        head=head_of(model),
        softcap=getattr(config, "final_logit_softcapping", None),
        max_positions=config.max_position_embeddings,
    )


def _llama_block(
    model: nn.Module, layer: Any, name: str, rotary: tuple[Tensor, Tensor], *, offset: bool
) -> DecoderBlock:
    config: Any = model.config
    module = layer.self_attn
    sandwich = hasattr(layer, "pre_feedforward_layernorm")  # Gemma 2 and 3 also norm what a branch gives back
    softcap = config.attn_logit_softcapping if config.model_type == "gemma2" else None
    attention = Attention(
        qkv=stacked(model, [f"{name}.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")]),
        out=stacked(model, [f"{name}.self_attn.o_proj"]),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_width=module.head_dim,
        scale=module.scaling,
        q_norm=rms_norm(module.q_norm, offset=offset) if hasattr(module, "q_norm") else None,
        k_norm=rms_norm(module.k_norm, offset=offset) if hasattr(module, "k_norm") else None,
        cos=rotary[0],
        sin=rotary[1],
        rotary_width=module.head_dim,
        window=getattr(module, "sliding_window", None),
        softcap=softcap,
    )
    after = rms_norm(layer.post_attention_layernorm, offset=offset)
    return DecoderBlock(
        attention_norm=rms_norm(layer.input_layernorm, offset=offset),
        attention=attention,
        attention_out_norm=after if sandwich else None,
        mlp_norm=rms_norm(layer.pre_feedforward_layernorm, offset=offset) if sandwich else after,
        mlp=Mlp(
            up=stacked(model, [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]),
            down=stacked(model, [f"{name}.mlp.down_proj"]),
            activation=activation_of(config),
            gated=True,
        ),
        mlp_out_norm=rms_norm(layer.post_feedforward_layernorm, offset=offset) if sandwich else None,
    )


def _read_gpt2(model: nn.Module) -> Decoder:
    config: Any = model.config
    if config.add_cross_attention:
        raise BadInput("the model attends to an encoder", hint="only decoders generate here")
    body: Any = model.transformer
    return Decoder(
        embedding=body.wte.weight.detach(),
        positions=body.wpe.weight.detach(),
        blocks=tuple(_gpt2_block(model, layer, f"transformer.h.{i}") for i, layer in enumerate(body.h)),
        norm=layer_norm(body.ln_f),
        head=head_of(model),
        max_positions=config.n_positions,
    )


def _gpt2_block(model: nn.Module, layer: Any, name: str) -> DecoderBlock:
    config: Any = model.config
    attention = Attention(
        qkv=transposed(model, f"{name}.attn.c_attn"),
        out=transposed(model, f"{name}.attn.c_proj"),
        num_heads=config.n_head,
        num_kv_heads=config.n_head,
        head_width=layer.attn.head_dim,
        scale=layer.attn.scaling,
    )
    return DecoderBlock(
        attention_norm=layer_norm(layer.ln_1),
        attention=attention,
        mlp_norm=layer_norm(layer.ln_2),
        mlp=Mlp(
            up=transposed(model, f"{name}.mlp.c_fc"),
            down=transposed(model, f"{name}.mlp.c_proj"),
            activation=activation_of(config),
            gated=False,
        ),
    )


def _read_neox(model: nn.Module) -> Decoder:
    config: Any = model.config
    body: Any = model.gpt_neox
    rotary = rotary_tables(body.rotary_emb, config, like=body.embed_in.weight)
    blocks = [
        _neox_block(model, layer, f"gpt_neox.layers.{i}", rotary) for i, layer in enumerate(body.layers)
    ]
    return Decoder(
        embedding=body.embed_in.weight.detach(),
        blocks=tuple(blocks),
        norm=layer_norm(body.final_layer_norm),
        head=head_of(model),
        max_positions=config.max_position_embeddings,
    )


def _neox_block(model: nn.Module, layer: Any, name: str, rotary: tuple[Tensor, Tensor]) -> DecoderBlock:
    config: Any = model.config
    heads = config.num_attention_heads
    attention = Attention(
        qkv=stacked(model, [f"{name}.attention.query_key_value"]),
        out=stacked(model, [f"{name}.attention.dense"]),
        num_heads=heads,
        num_kv_heads=heads,
        head_width=layer.attention.head_size,
        scale=layer.attention.scaling,
        cos=rotary[0],
        sin=rotary[1],
        rotary_width=2 * rotary[0].shape[1],
        interleaved=True,
    )
    return DecoderBlock(
        attention_norm=layer_norm(layer.input_layernorm),
        attention=attention,
        mlp_norm=layer_norm(layer.post_attention_layernorm),
        mlp=Mlp(
            up=stacked(model, [f"{name}.mlp.dense_h_to_4h"]),
            down=stacked(model, [f"{name}.mlp.dense_4h_to_h"]),
            activation=activation_of(config),
            gated=False,
        ),
        parallel=config.use_parallel_residual,
    )


FAMILIES: dict[str, Callable[[nn.Module], Decoder]] = {
    "llama": _read_llama,
    "qwen2": _read_llama,
    "qwen3": _read_llama,
    "gemma": _read_llama,
    "gemma2": _read_llama,
    "gemma3_text": _read_llama,
    "gpt2": _read_gpt2,
    "gpt_neox": _read_neox,
}


def rotary_tables(
    rotary: Any, config: Any, *, like: Tensor, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [positions, rotary width / 2] in the type that the model rotates in."""
    import torch

    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    if kind not in STATIC_ROTARY:
        raise BadInput(
            f"rotary scaling {kind!r} changes with the length of the text",
            hint=f"supported: {', '.join(sorted(STATIC_ROTARY))}",
        )
    positions = torch.arange(config.max_position_embeddings, device=like.device)[None]
    extra = {} if layer_type is None else {"layer_type": layer_type}
    cos, sin = rotary(like.detach(), positions, **extra)
    half = cos.shape[-1] // 2  # the second half repeats the first
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def rms_norm(module: Any, *, offset: bool = False) -> Norm:
    """Read an RMS norm; with `offset` it is Gemma's, which stores the factor less 1."""
    return Norm(
        weight=module.weight.detach(),
        eps=module.eps if offset else module.variance_epsilon,
        centred=False,
        offset=1.0 if offset else 0.0,
    )


def layer_norm(module: nn.LayerNorm) -> Norm:
    """Read a layer norm, with or without a bias."""
    bias: Tensor | None = module.bias  # annotated as always there, but None without a bias
    bias = None if bias is None else bias.detach()
    return Norm(weight=module.weight.detach(), bias=bias, eps=module.eps, centred=True)


def head_of(model: nn.Module) -> Projection:
    """Read the product that gives the logits, `lm_head`."""
    linear_of(model, "lm_head")
    return stacked(model, ["lm_head"])


def _gemma_scale(embedding: Tensor) -> float:
    """Return the root of the width, rounded to the embedding's type as the model does."""
    import torch

    return float(torch.tensor(embedding.shape[1] ** 0.5).to(embedding.dtype))


def activation_of(config: Any) -> Activation:
    """Read the MLP's non-linearity, by whichever name the config has for it."""
    for name in ("hidden_activation", "hidden_act", "activation_function"):
        value = getattr(config, name, None)
        if value in ACTIVATIONS:
            return ACTIVATIONS[value]
        if value is not None:
            raise BadInput(f"activation {value!r} is unknown", hint=f"known: {', '.join(ACTIVATIONS)}")
    raise BadInput("the config names no activation", hint="expected hidden_act in it")
