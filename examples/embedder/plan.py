"""The job as Flatout plans it: the same model, loss and optimizer, and batches of any size.

    flatout plan fit examples/embedder/conf --model examples/embedder/plan.py:build

Memory depends on shapes only, so nothing is downloaded: untrained encoders, random tokens.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

import torch
from embedder import Embedder, make_optimizer, step_loss
from industries import CHANNELS, FIRST_WORD, Texts
from settings import precision_of

from flatout.memory.jobs.job import Job, PrecisionName, Recipe


def build(settings: Mapping[str, Any]) -> tuple[Job, Recipe]:
    """The job of one stage; `settings` is config.yaml with the stage laid over it."""
    vocabulary = int(settings["model"]["encoder"]["vocabulary"])

    def make_batch(*, batch_size: int, length: int, n_positives: int, n_negatives: int) -> dict[str, Texts]:
        return {
            "anchor": random_texts(batch_size, length=length, vocabulary=vocabulary),
            "positives": random_texts(batch_size * n_positives, length=length, vocabulary=vocabulary),
            "negatives": random_texts(batch_size * n_negatives, length=length, vocabulary=vocabulary),
        }

    trainer = settings["training"]["trainer"]
    job = Job(
        name=f"embedder, stage {settings.get('stage', 'none')}",
        make_model=lambda: Embedder(settings),
        make_batch=make_batch,
        loss=step_loss,  # type: ignore[arg-type]
        make_optimizer=lambda parameters: make_optimizer(parameters, settings),
        sizes={
            "batch_size": int(settings["data_loader"]["batch_size"]),
            "length": int(settings["data_loader"]["max_length"]),
            "n_positives": int(settings["n_positives"]),
            "n_negatives": int(settings["n_negatives"]),
        },
    )
    recipe = Recipe(
        precision=typing.cast(PrecisionName, precision_of(settings)),
        accumulation=int(trainer["accumulate_grad_batches"]),
        clip_norm=float(trainer["gradient_clip_val"]),
        checkpointing=bool(settings["model"]["gradient_checkpointing"]),
    )
    return job, recipe


def random_texts(num_rows: int, *, length: int, vocabulary: int) -> Texts:
    """Rows of one length whose last token is padding: as in real batches, the mask is not all ones."""
    mask = torch.ones(num_rows, len(CHANNELS), length, dtype=torch.long)
    mask[..., -1] = 0
    return {
        "input_ids": torch.randint(FIRST_WORD, vocabulary, (num_rows, len(CHANNELS), length)),
        "attention_mask": mask,
    }
