"""A tiny model with a tokenizer, questions, and settings of a search that takes a second."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "steering" / "tiny_model.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_steering_model", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_tiny(folder: Path) -> Path:
    """`model` and `questions.jsonl` in a folder."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    made = example()
    made.write_model(folder / "model")
    made.write_questions(folder / "questions.jsonl")
    return folder


def tiny_search(folder: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Settings by their names."""
    return {
        "model": str(folder / "model"),
        "questions": str(folder / "questions.jsonl"),
        "out": str(out),
        "trials": 12,
        "methods": ["mean-difference"],
        "strength": [-1.0, 1.5],
        "device": "cpu",
        "max_new_tokens": 4,
        "examples": 2,
        "rungs": 2,
        **changes,
    }
