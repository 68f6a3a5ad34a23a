"""A model folder in, a model folder out.

What training changed lies in the decoder's products, which are views of the model's own parameters: the model
is saved as it is.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from flatout.errors import BadInput, import_extra

if TYPE_CHECKING:
    from torch import nn

DType = Literal["auto", "float32", "bfloat16"]


def open_model(folder: Path, *, device: torch.device, dtype: DType) -> nn.Module:
    """The causal language model of a folder, ready to run."""
    if not folder.is_dir():
        raise BadInput(f"no model folder at {folder}", hint="give a folder that save_pretrained wrote")
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} has no config.json", hint="give a folder that save_pretrained wrote")
    transformers = import_extra("transformers", extra="evolution")
    # On a CPU bfloat16 is emulated, and slower than float32.
    chosen = dtype if dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    try:
        with _without_bars():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, chosen), local_files_only=True
            )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(f"{folder} holds no causal language model that can be loaded: {reason}") from error
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
        with _without_bars():
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


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers' progress bars off stderr, and leave the user's choice as it was."""
    logging = import_extra("transformers.utils.logging", extra="evolution")
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
