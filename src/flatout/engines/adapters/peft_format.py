"""Adapters as PEFT's folders: adapter_config.json and adapter_model.safetensors.

PEFT names a factor by the module it belongs to, below "base_model.model." (its own wrapper).  An adapter that
was trained on a model with a head has one more part in front ("roberta.encoder..."), which is taken away
where the encoder's own names follow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.engines.adapters.lora.bank import AdapterBank, AdapterSpec
from flatout.ground.atomic_files import write_whole
from flatout.ground.errors import BadInput, import_extra

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RUN = "flatout_run.json"  # beside them: the run that an adapter was exported from
WRAPPER = "base_model.model."
FACTORS = (".lora_A.weight", ".lora_B.weight")


def check_target(to: Path, *, run: Path) -> None:
    """BadInput where `to` holds an adapter that is not known to be of this run: nothing replaces it."""
    for folder in (path.parent for path in (*to.glob(CONFIG), *sorted(to.glob(f"*/{CONFIG}")))):
        if (owner := _run_of(folder)) != str(run.resolve()):
            raise BadInput(
                f"{folder} holds an adapter of {owner or 'an unknown run'}",
                hint=f"take another --to, or remove {folder}",
            )


def export(bank: AdapterBank, name: str, folder: Path, *, base_model_name: str, run: Path) -> None:
    """Write one adapter of a run as a folder that `PeftModel.from_pretrained` loads."""
    number = bank.number(name)
    spec = bank.specs[number]
    if not spec.rank:
        raise BadInput(f"adapter {name!r} has rank 0", hint="a run with heads only has nothing to export")
    config = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "base_model_name_or_path": base_model_name,
        "r": spec.rank,
        "lora_alpha": spec.scale * spec.rank,
        "lora_dropout": spec.dropout,
        "target_modules": [site.name for site in bank.sites.values() if site.adapted[number]],
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    tensors = {f"{WRAPPER}{key}": tensor.cpu() for key, tensor in bank.state_dict(name).items()}
    safetensors = import_extra("safetensors.torch", extra="adapters")
    write_whole(folder / RUN, (json.dumps({"run": str(run.resolve())}) + "\n").encode())
    write_whole(folder / WEIGHTS, safetensors.save(tensors, metadata={"format": "pt"}))
    write_whole(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def read(
    folder: Path, *, name: str | None = None, modules: Iterable[str] | None = None
) -> tuple[AdapterSpec, dict[str, Tensor]]:
    """The spec of an adapter's folder and its tensors, as `AdapterBank.load_state_dict` takes them.

    `modules` are the names of the encoder's modules; with them, a prefix that the encoder had in another
    model is taken away.
    """
    config = _config(folder)
    _check(config, folder)
    tensors = {}
    for key, tensor in _tensors(folder).items():
        if not key.endswith(FACTORS):
            continue  # a saved head is the task's own
        tensors[key.removeprefix(WRAPPER)] = tensor
    if not tensors:
        raise BadInput(f"{folder / WEIGHTS} holds no factors", hint="only LoRA of linear maps can be read")
    if modules is not None:
        tensors = _strip_prefix(tensors, set(modules))
    targets = tuple(dict.fromkeys(_module(key) for key in tensors))
    spec = AdapterSpec(
        name=name or folder.name.replace(".", "-"),
        rank=int(config["r"]),
        alpha=float(config.get("lora_alpha", 8)),
        dropout=float(config.get("lora_dropout", 0.0)),
        targets=targets,
    )
    return spec, tensors


def _check(config: dict[str, Any], folder: Path) -> None:
    """Refuse kinds of LoRA that compute anything but scale * B A."""
    if config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        raise BadInput(
            f"{folder} is a {config.get('peft_type', 'folder without peft_type')}",
            hint="only LoRA can be read",
        )
    others = ("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "modules_to_save")
    used = [key for key in others if config.get(key)]
    if config.get("bias", "none") != "none":
        used.append("bias")
    if used:
        raise BadInput(
            f"{folder / CONFIG} uses {', '.join(used)}",
            hint="an adapter here has one rank and one scale, no more",
        )


def _run_of(folder: Path) -> str | None:
    """The run that an adapter was exported from; None where its folder does not say."""
    try:
        found = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(found["run"]) if isinstance(found, dict) and "run" in found else None


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{folder / CONFIG} cannot be read: {error}", hint="give a folder that PEFT wrote"
        ) from error
    if not isinstance(config, dict):
        raise BadInput(f"{folder / CONFIG} is not a table", hint="give a folder that PEFT wrote")
    return config


def _tensors(folder: Path) -> dict[str, Tensor]:
    safetensors = import_extra("safetensors", extra="adapters")
    files = import_extra("safetensors.torch", extra="adapters")
    try:
        tensors: dict[str, Tensor] = files.load_file(folder / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise BadInput(
            f"{folder / WEIGHTS} cannot be read: {error}",
            hint="save the adapter with safetensors; pickled .bin files are never opened",
        ) from error
    return tensors


def _strip_prefix(tensors: dict[str, Tensor], modules: set[str]) -> dict[str, Tensor]:
    """Remove whatever stands before the encoder's own names."""
    found = {}
    for key, tensor in tensors.items():
        module = _module(key)
        parts = module.split(".")
        own = next((".".join(parts[i:]) for i in range(len(parts)) if ".".join(parts[i:]) in modules), module)
        found[own + key.removeprefix(module)] = tensor
    return found


def _module(key: str) -> str:
    return key.rsplit(".lora_", 1)[0]
