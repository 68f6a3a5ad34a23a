"""Where a transformers model keeps its blocks.

Every family names them otherwise (model.layers, transformer.h, gpt_neox.layers), but the stack of blocks is
the one list of modules as long as the config says the text model is deep.  Layer i is the residual stream
after block i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flatout.ground.errors import BadInput


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Find the stack of decoder blocks of a causal language model."""
    config = _text_config(model)
    depth = getattr(config, "num_hidden_layers", None)
    if depth is None:
        raise BadInput(
            f"{type(model).__name__} has no config with num_hidden_layers",
            hint="give a causal language model of transformers",
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "use_bidirectional_attention", False):
        raise BadInput(f"{type(model).__name__} is not causal", hint="use a decoder that generates text")
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth and not _is_vision(name)
    ]
    if not found:
        raise BadInput(
            f"{type(model).__name__} has no list of {depth} blocks",
            hint="use a model whose layers are in one list",
        )
    return min(found, key=lambda item: item[0].count("."))[1]


def chosen_layers(layers: Literal["all"] | Sequence[int], *, num_layers: int) -> tuple[int, ...]:
    """Resolve layers to numbers from 0, sorted; numbers below 0 count from the last."""
    if isinstance(layers, str):
        if layers != "all":
            raise BadInput(f"layers={layers!r} is unknown", hint='give "all" or a list of numbers')
        return tuple(range(num_layers))
    wrong = [layer for layer in layers if not -num_layers <= layer < num_layers]
    if wrong or not layers:
        named = f"layer {wrong[0]}" if wrong else "no layer"
        raise BadInput(f"{named} was asked for", hint=f"the model has layers 0 to {num_layers - 1}")
    return tuple(sorted({layer % num_layers for layer in layers}))


def hidden_of(output: Any) -> Tensor:
    """Return hidden states [rows, tokens, width] of a block's output: a tensor, or the first of a tuple."""
    hidden = output[0] if isinstance(output, tuple) else output
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        raise BadInput(f"a block gives a {type(output).__name__}, not hidden states [rows, tokens, width]")
    return hidden


def width_of(model: nn.Module) -> int:
    """Return D, the width of the residual stream."""
    return int(_text_config(model).hidden_size)


def max_positions(model: nn.Module) -> int | None:
    """Return the longest text that the model was made for, in tokens; None if its config does not say."""
    most = getattr(_text_config(model), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def dtype_name(model: nn.Module) -> str:
    """Return the type of the weights in one word: bfloat16."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def input_device(model: nn.Module) -> torch.device:
    """Return the device of token numbers: the embedding's, wherever the rest of a sharded model lies."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    device: torch.device = embedding.weight.device
    return device


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _is_vision(name: str) -> bool:
    return any(part.startswith(("vision", "visual", "audio")) for part in name.split("."))
