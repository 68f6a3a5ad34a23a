"""A model folder in, a model folder out.

What training changed lies in the decoder's products, which are views of the model's own parameters: the model
is saved as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatout.atomic_files import whole_folder
from flatout.engines.run import models
from flatout.errors import BadInput, import_extra

if TYPE_CHECKING:
    from torch import nn

    from flatout.engines.evolution.tasks.task import Prompt
    from flatout.engines.run.models import DType

EXTRA = "evolution"


def open_model(folder: Path, *, device: torch.device, dtype: DType) -> nn.Module:
    """Load the causal language model of a folder, ready to run."""
    what = "causal language model"
    model: nn.Module = models.load_pretrained(
        "AutoModelForCausalLM", folder, what=what, extra=EXTRA, dtype=getattr(torch, dtype)
    )
    return model.to(device)


def open_tokenizer(folder: Path, *, prompts: Sequence[Prompt]) -> Any:
    """Load the tokenizer beside a model; None where every prompt is token numbers."""
    if all(prompt.token_ids is not None for prompt in prompts):
        return None
    return models.open_tokenizer(folder, extra=EXTRA)


def end_tokens(model: nn.Module) -> tuple[int, ...]:
    """The tokens that end a text, as the model's own generation settings have them."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def save_model(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the trained model as transformers loads it, whole or not at all."""
    # Parts of a stacked weight share a storage, which a safetensors file cannot say: save each alone.
    state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    safetensors = import_extra("safetensors", extra=EXTRA)
    try:
        with whole_folder(folder, replace=True) as partial, models.quietly(extra=EXTRA):
            model.save_pretrained(partial, state_dict=state)  # type: ignore[operator]
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
    except (OSError, safetensors.SafetensorError) as error:
        raise BadInput(
            f"the trained model {folder} cannot be written: {error}",
            hint="free some space; --resume writes it from the last checkpoint",
        ) from error
