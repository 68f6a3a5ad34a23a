"""A model folder as a model and its tokenizer, on a CPU, on a GPU, or over several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.engines.run import models
from flatout.engines.steering.workers.placement import ROOM_SHARE, DType, chosen_dtype
from flatout.errors import BadInput, import_extra

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A model ready to run, and what turns text into its tokens."""

    model: nn.Module
    tokenizer: Any


def check_folder(folder: Path) -> None:
    """Refuse what cannot be a model folder before anything slow is imported."""
    models.check_folder(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise BadInput(
            f"{folder} has no tokenizer", hint="save it there too: tokenizer.save_pretrained(folder)"
        )


def open_model(
    folder: Path, *, device: str = "auto", dtype: DType = "auto", gpus: Sequence[int] = ()
) -> Opened:
    """The causal language model of a folder and its tokenizer.

    `gpus` are CUDA's numbers of those it may use, by default the first.  Over several, accelerate lays the
    layers in order.
    """
    check_folder(folder)
    import torch

    transformers = import_extra("transformers", extra="steering")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not on_gpu:
        raise BadInput("no GPU is visible", hint="take --device cpu, or check flatout devices")
    options: dict[str, Any] = {
        "dtype": getattr(torch, chosen_dtype(dtype, on_gpu=on_gpu)),
    }
    if on_gpu and len(gpus) > 1:
        import_extra("accelerate", extra="steering")
        options["device_map"] = "auto"
        options["max_memory"] = {
            index: int(torch.cuda.mem_get_info(index)[0] * (1 - ROOM_SHARE)) for index in gpus
        }
    model = models.load_pretrained(
        "AutoModelForCausalLM", folder, what="causal language model", extra="steering", **options
    )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"{folder} has no tokenizer that can be read: {models.first_line(error)}",
            hint="save one there with tokenizer.save_pretrained",
        ) from error
    model.requires_grad_(False)
    model.eval()
    if "device_map" not in options:
        model.to(f"cuda:{gpus[0] if gpus else 0}" if on_gpu else "cpu")
    return Opened(model=model, tokenizer=tokenizer)
