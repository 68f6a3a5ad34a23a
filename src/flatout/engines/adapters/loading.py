"""A frozen encoder and its tokenizer, from a folder as `save_pretrained` writes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.errors import BadInput, import_extra

HINT = "give a folder that save_pretrained wrote"


def open_encoder(folder: Path, *, device: torch.device) -> nn.Module:
    """The encoder in float32, frozen; what computes in less casts it."""
    if not folder.is_dir():
        raise BadInput(f"no model folder at {folder}", hint=HINT)
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} has no config.json", hint=HINT)
    transformers = import_extra("transformers", extra="adapters")
    try:
        with _quietly():
            model, report = transformers.AutoModel.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder} holds no encoder that can be loaded: {_first_line(error)}") from error
    if getattr(model.config, "is_encoder_decoder", False) or getattr(model.config, "is_decoder", False):
        raise BadInput(
            f"{folder} holds a {model.config.model_type} model, which is no encoder",
            hint="BERT, RoBERTa, MiniLM and the like are",
        )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # nothing here reads it, and where a folder has none it would be drawn at random
    missing = sorted(name for name in report["missing_keys"] if "pooler." not in name)
    if missing:
        raise BadInput(
            f"{folder} lacks {len(missing)} weights of its encoder, first {missing[0]}",
            hint=HINT,
        )
    loaded: nn.Module = model.requires_grad_(False).eval().to(device)
    return loaded


def open_tokenizer(folder: Path) -> Any:
    """The fast tokenizer beside a model: spans need its offsets."""
    transformers = import_extra("transformers", extra="adapters")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"{folder} has no tokenizer that can be read: {_first_line(error)}",
            hint="save one there with tokenizer.save_pretrained",
        ) from error
    if not tokenizer.is_fast:
        raise BadInput(f"the tokenizer of {folder} is no fast one", hint="save one with tokenizer.json")
    if tokenizer.pad_token_id is None:
        raise BadInput(f"the tokenizer of {folder} has no padding token", hint="set its pad_token")
    return tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep transformers' bars and reports off stderr, and leave the user's choice as it was."""
    logging = import_extra("transformers.utils.logging", extra="adapters")
    enabled, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if enabled:
            logging.enable_progress_bar()
