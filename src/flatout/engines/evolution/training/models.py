"""A model folder in, a model folder out.

What training changed lies in the decoder's products, which are views of the model's own parameters: the model
is saved as it is.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from flatout.engines.run.models import load_pretrained, quietly
from flatout.errors import BadInput, import_extra

if TYPE_CHECKING:
    from torch import nn

DType = Literal["auto", "float32", "bfloat16"]


def open_model(folder: Path, *, device: torch.device, dtype: DType) -> nn.Module:
    """The causal language model of a folder, ready to run."""
    # On a CPU bfloat16 is emulated, and slower than float32.
    chosen = dtype if dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    model = load_pretrained(
        "AutoModelForCausalLM",
        folder,
        what="causal language model",
        extra="evolution",
        dtype=getattr(torch, chosen),
    )
    model.requires_grad_(False)
    loaded: nn.Module = model.eval().to(device)
    return loaded


def end_tokens(model: nn.Module) -> tuple[int, ...]:
    """The tokens that end a text, as the model's own generation settings have them."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def save_model(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the trained model as transformers loads it, whole or not at all."""
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    # Parts of a stacked weight share a storage, which a safetensors file cannot say: each is saved as its
    # own.
    state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    safetensors = import_extra("safetensors", extra="evolution")
    try:
        with quietly(extra="evolution"):
            model.save_pretrained(partial, state_dict=state)  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise BadInput(
            f"the trained model {folder} cannot be written: {error}",
            hint="free some space; --resume writes it from the last checkpoint",
        ) from error
