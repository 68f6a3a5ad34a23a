"""A model folder as a model and its tokenizer, on a CPU, on a GPU, or over several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.engines.run import models
from flatout.engines.steering.workers.placement import ROOM_SHARE, GpuRoom
from flatout.ground.errors import BadInput, import_extra

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model ready to run, and what turns text into its tokens."""

    model: nn.Module
    tokenizer: Any


def check_model_folder(folder: Path | str) -> Path:
    """Refuse what cannot be a model folder before anything slow is imported."""
    folder = models.check_folder(Path(folder))
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise BadInput(
            f"{folder} has no tokenizer", hint="save it there too: tokenizer.save_pretrained(folder)"
        )
    return folder


def load_model(
    folder: Path | str, *, gpus: Sequence[GpuRoom] = (), dtype: models.DTypeOrAuto = "auto"
) -> LoadedModel:
    """Load the causal language model of a folder and its tokenizer.

    Without GPUs it goes to the CPU; over several, accelerate lays the layers in order.
    """
    folder = check_model_folder(folder)
    import torch

    indices = [gpu.index for gpu in gpus if gpu.index is not None]
    device = torch.device("cuda", indices[0] if indices else 0) if gpus else torch.device("cpu")
    chosen = models.choose_dtype(dtype, capability=models.capability_of(device)).value
    options: dict[str, Any] = {"dtype": getattr(torch, chosen)}
    if len(indices) > 1:
        import_extra("accelerate", extra="steering")
        free = {index: torch.cuda.mem_get_info(index)[0] for index in indices}
        options["device_map"] = "auto"
        options["max_memory"] = {index: int(num * (1 - ROOM_SHARE)) for index, num in free.items()}
    model = models.load_pretrained(
        "AutoModelForCausalLM", folder, what="causal language model", extra="steering", **options
    )
    if "device_map" not in options:
        model.to(device)
    return LoadedModel(model=model, tokenizer=models.open_tokenizer(folder, extra="steering"))
