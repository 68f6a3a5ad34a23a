"""Adapters as PEFT's folders: adapter_config.json and adapter_model.safetensors.

PEFT names a factor by its module, below "base_model.model." (its own wrapper), and below the encoder's name
where the adapter was trained under a head of transformers ("bert.").  So a factor is found by the end of its
name, from the number of its layer on.  Weights are read from safetensors only: a pickle executes code.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.run.tensor_files import load_tensors, save_tensors
from flatout.ground.documents import write_json
from flatout.ground.errors import BadInput

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
WRAPPER = "base_model.model."
FACTOR = re.compile(r"(.+)\.(lora_[AB])\.weight")
FROM_LAYER = re.compile(r"[^.]+\.\d+\..+")  # layer.0.attention.self.query
# Options that compute something else than the product of two factors.
UNKNOWN_HERE = ("use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "layer_replication")
CHANGES_BASE = ("pissa", "olora", "loftq", "corda")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftAdapter:
    """An adapter of the user: `targets` are the ends of its modules' names, the keys of `factors`."""

    folder: Path
    rank: int
    alpha: float
    targets: tuple[str, ...]
    factors: dict[str, dict[str, Tensor]] = field(repr=False)  # {"lora_A": ..., "lora_B": ...}


def read_adapter(folder: Path) -> PeftAdapter:
    """Read an adapter that PEFT, or `export`, wrote; BadInput names what is not supported."""
    config = _read_config(folder)
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise BadInput(f"{folder / CONFIG} has the rank {rank!r}", hint="give an adapter with r of 1 or more")
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _read_weights(folder).items():
        if any(f".{module}." in name for module in config.get("modules_to_save") or ()):
            continue  # a head: the task has its own
        if (found := FACTOR.fullmatch(name)) is None:
            raise BadInput(
                f"{folder} holds {name}, which is not a factor of a linear map",
                hint="give a LoRA adapter of linear layers alone",
            )
        module, factor = found.groups()
        inside = module.removeprefix(WRAPPER)
        factors.setdefault(_ending(inside), {})[factor] = tensor.float()
    for ending, pair in factors.items():
        if pair.keys() != {"lora_A", "lora_B"}:
            raise BadInput(f"{folder} has only one factor of {ending}", hint="save the adapter again")
        ranks = (pair["lora_A"].shape[0], pair["lora_B"].shape[1])
        if ranks != (rank, rank):
            raise BadInput(
                f"{folder}: {ending} has the rank {ranks[0]}, and {CONFIG} says {rank}",
                hint="give an adapter of one rank",
            )
    if not factors:
        raise BadInput(f"{folder / WEIGHTS} holds no factors", hint="give an adapter that PEFT saved")
    alpha = float(config.get("lora_alpha") or rank)
    return PeftAdapter(
        folder=folder,
        rank=rank,
        alpha=alpha * math.sqrt(rank) if config.get("use_rslora") else alpha,
        targets=tuple(factors),
        factors=factors,
    )


def load_adapter(bank: AdapterBank, name: str, adapter: PeftAdapter) -> None:
    """Initialise an adapter of the bank with other factors; every shape must fit, or nothing changes."""
    number = bank.number(name)
    state = {}
    for site in bank.sites.values():
        if not site.adapted[number]:
            continue
        for factor, tensor in adapter.factors.get(_ending(site.name), {}).items():
            size, wanted = (
                (tensor.shape[1], site.num_in) if factor == "lora_A" else (tensor.shape[0], site.num_out)
            )
            if size != wanted:
                raise BadInput(
                    f"{adapter.folder}: {factor} of {site.name} has the width {size}, the encoder {wanted}",
                    hint="give the encoder that the adapter was trained on as model",
                )
            state[f"{site.name}.{factor}.weight"] = tensor
    bank.load_state_dict(name, state)


def _ending(module: str) -> str:
    """Return a module's name from its layer number on; all of it where it has none."""
    found = FROM_LAYER.search(module)
    return found[0] if found else module


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise BadInput(
            f"{path} {why}", hint="init: names a folder that PEFT's save_pretrained wrote"
        ) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise BadInput(f"{folder} holds an adapter of the type {kind}, not LORA", hint="give a LoRA adapter")
    wrong = [key for key in UNKNOWN_HERE if config.get(key)]
    if config.get("bias", "none") != "none":
        wrong.append("bias")
    if str(config.get("init_lora_weights", "")).startswith(CHANGES_BASE):
        wrong.append("init_lora_weights")
    if wrong:
        said = ", ".join(f"{key}={config[key]!r}" for key in wrong)
        raise BadInput(f"{folder} has {said}", hint="init takes plain LoRA: two factors per linear map")
    return config


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = (folder / PICKLE).is_file()
        raise BadInput(
            f"{folder} holds {PICKLE} and no {WEIGHTS}" if pickled else f"{path} does not exist",
            hint="a pickle executes what it holds: save the adapter with safe_serialization=True"
            if pickled
            else "save the adapter with PEFT's save_pretrained",
        )
    return load_tensors(path, extra="adapters", hint="save the adapter again")


def export(bank: AdapterBank, name: str, folder: Path, *, base_model_name: str) -> None:
    """Write one adapter as a folder that `PeftModel.from_pretrained` loads."""
    number = bank.number(name)
    spec = bank.specs[number]
    if not spec.rank:
        raise BadInput(f"adapter {name!r} has rank 0", hint="a run with heads only has nothing to export")
    config = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "base_model_name_or_path": base_model_name,
        "r": spec.rank,
        "lora_alpha": _whole(2.0 * spec.rank if spec.alpha is None else spec.alpha),
        "lora_dropout": spec.dropout,
        "target_modules": [site.name for site in bank.sites.values() if site.adapted[number]],
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    tensors = {f"{WRAPPER}{key}": tensor for key, tensor in bank.state_dict(name).items()}
    save_tensors(folder / WEIGHTS, tensors, extra="adapters", metadata={"format": "pt"})
    write_json(folder / CONFIG, config)


def _whole(value: float) -> float | int:
    """Return a number as PEFT writes it: without a fraction where it has none."""
    return int(value) if value == int(value) else value
