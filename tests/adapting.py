"""A tiny encoder with a tokenizer, and settings under which all three phases run in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.adapter_tokens import tiny_tokenizer

LONGEST = 96


def save_tiny(folder: Path, *, seed: int = 0) -> Path:
    """A folder with a BERT of one layer and its tokenizer."""
    from transformers import BertConfig, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generated(*, train: int = 40, held_out: int = 8) -> dict[str, Any]:
    return {"source": "generated", "num_train": train, "num_validation": held_out, "num_test": held_out}


def tiny_settings(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """A task with a head of its own and one that writes, six steps, two epochs and four steps."""
    return {
        "model": str(model),
        "out": str(out),
        "device": "cpu",
        "max_length": LONGEST,
        "log_every": 1,
        "checkpoint_every": 2,
        "tasks": {
            "sentiment": {"rank": 2, "data": generated(), "patience": 9},
            "translation": {"rank": 3, "data": generated(), "settings": {"max_target_length": 32}},
        },
        "decoder": {"layers": 1},
        "router": {"hidden": [16]},
        "phase1": {
            "steps": 6,
            "tokens": 512,
            "accumulate": 2,
            "buckets": 2,
            "lr": 0.001,
            "evaluate_every": 3,
            "validate_rows": 8,
        },
        "phase2": {"epochs": 2, "rows": 16},
        "phase3": {
            "steps": 4,
            "tokens": 256,
            "accumulate": 2,
            "buckets": 2,
            "lr": 0.001,
            "evaluate_every": 2,
            "validate_rows": 8,
        },
        "evaluation": {"rows": 4, "tokens": 1024},
        **changes,
    }


def with_phase(settings: dict[str, Any], phase: str, **changes: Any) -> dict[str, Any]:
    return {**settings, phase: {**settings[phase], **changes}}


def opened(model: Path, out: Path, **changes: Any) -> Any:
    """The parts of a tiny run in this process."""
    from flatout.engines.adapters.assembly import Assembly
    from flatout.engines.adapters.settings import make_config
    from flatout.engines.adapters.training.processes import Processes

    config = make_config(tiny_settings(model, out, **changes))
    return Assembly(config, processes=Processes(device=torch.device(changes.get("device", "cpu"))))


def phase_run(assembly: Any, phase: str, *, steps: int, lines: list[str] | None = None) -> Any:
    """A phase that begins, which tells its lines and keeps its checkpoints as in earnest."""
    from flatout.engines.adapters.training.live_line import LiveLine
    from flatout.engines.adapters.training.phase import PhaseRun
    from flatout.engines.adapters.training.stopping import StopRequest

    told: list[str] = [] if lines is None else lines
    return PhaseRun(
        assembly,
        phase=phase,
        steps=steps,
        found=None,
        log=None,
        live=LiveLine(cuda_index=None),
        stop=StopRequest(),
        on_line=told.append,
        on_note=told.append,
    )
