"""Adapters as PEFT's folders: adapter_config.json and adapter_model.safetensors.

PEFT names a factor by the module it belongs to, below "base_model.model." (its own wrapper).
"""

from __future__ import annotations

import json
from pathlib import Path

from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.ground.atomic_files import write_whole
from flatout.ground.errors import BadInput, import_extra

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RUN = "flatout_run.json"  # beside them: the run that an adapter was exported from
WRAPPER = "base_model.model."


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


def _run_of(folder: Path) -> str | None:
    """The run that an adapter was exported from; None where its folder does not say."""
    try:
        found = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(found["run"]) if isinstance(found, dict) and "run" in found else None
