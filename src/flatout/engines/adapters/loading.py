"""A frozen encoder and its tokenizer, from a folder as `save_pretrained` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.engines.run.models import first_line, load_pretrained
from flatout.errors import BadInput, import_extra


def open_encoder(folder: Path, *, device: torch.device) -> nn.Module:
    """The encoder in float32, frozen; what computes in less casts it."""
    model = load_pretrained(
        "AutoModel", folder, what="encoder", extra="adapters", unread="pooler.", dtype=torch.float32
    )
    if getattr(model.config, "is_encoder_decoder", False) or getattr(model.config, "is_decoder", False):
        raise BadInput(
            f"{folder} holds a {model.config.model_type} model, which is no encoder",
            hint="BERT, RoBERTa, MiniLM and the like are",
        )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # nothing here reads it, and where a folder has none it would be drawn at random
    loaded: nn.Module = model.requires_grad_(False).eval().to(device)
    return loaded


def open_tokenizer(folder: Path) -> Any:
    """The fast tokenizer beside a model: spans need its offsets."""
    transformers = import_extra("transformers", extra="adapters")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"{folder} has no tokenizer that can be read: {first_line(error)}",
            hint="save one there with tokenizer.save_pretrained",
        ) from error
    if not tokenizer.is_fast:
        raise BadInput(f"the tokenizer of {folder} is no fast one", hint="save one with tokenizer.json")
    if tokenizer.pad_token_id is None:
        raise BadInput(f"the tokenizer of {folder} has no padding token", hint="set its pad_token")
    return tokenizer
