"""What is measured and estimated: a job, how it is stepped, and the family it belongs to.

A family is a kind of model.  A third of the families is held out: their measurements are never looked at
while the estimator is made better, so that the error on them is the error a stranger's model will see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.memory import optimizers
from flatout.memory.jobs.job import Job, PrecisionName, Recipe

HELD_OUT = ("t5", "u-net", "gru", "gemma", "transformer-encoder", "mixture")
GIB = 2**30

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "adamw-loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=False),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4, momentum=0.9),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-4),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-4),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-4),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=1.0),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2),
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, amsgrad=True),
    "sgd-nesterov": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, nesterov=True),
    "sparse-adam": lambda parameters: torch.optim.SparseAdam(parameters, lr=1e-3),
    "adamw-groups": optimizers.adamw_in_groups,
    "adamw-schedule": optimizers.adamw_with_schedule,
    "adamw-ema": optimizers.adamw_with_averages,
    "lion": optimizers.Lion,
    "muon": optimizers.MuonOrAdam,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One row of the measured table; `cap_bytes` asks also for the largest batch under that much memory."""

    family: str
    job: Job
    recipe: Recipe
    optimizer: str
    cap_bytes: int | None = None

    @property
    def held_out(self) -> bool:
        return self.family in HELD_OUT

    @property
    def batch_size(self) -> int:
        return self.job.sizes["batch_size"]

    @property
    def label(self) -> str:
        """Unique; `gpt2-small/batch8/length1024/bf16/checkpointing/adamw`."""
        recipe = self.recipe
        parts = [self.job.name, f"batch{self.batch_size}"]
        parts += [f"{name}{size}" for name, size in self.job.sizes.items() if name != "batch_size"]
        parts.append(recipe.precision)
        if recipe.checkpointing:
            parts.append("checkpointing")
        if recipe.accumulation > 1:
            parts.append(f"accumulation{recipe.accumulation}")
        if recipe.clip_norm is not None:
            parts.append("clip")
        parts.append(self.optimizer if recipe.mode == "train" else recipe.mode)
        if recipe.new_tokens:
            parts.append(f"tokens{recipe.new_tokens}")
        return "/".join(parts)

    def sizes(self, *, batch_size: int) -> dict[str, int]:
        return {**self.job.sizes, "batch_size": batch_size}


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model with its batches and its loss: what several configurations of a family share."""

    family: str
    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[..., Any]
    loss: Callable[[nn.Module, Any], Tensor]

    def at(
        self,
        batch_size: int,
        *,
        sizes: Mapping[str, int] | None = None,
        optimizer: str = "adamw",
        precision: PrecisionName = "fp32",
        cap_gib: int | None = None,
        **recipe: Any,
    ) -> Configuration:
        job = Job(
            name=self.name,
            make_model=self.make_model,
            make_batch=self.make_batch,
            loss=self.loss,
            make_optimizer=OPTIMIZERS[optimizer],
            sizes={"batch_size": batch_size, **(sizes or {})},
        )
        return Configuration(
            family=self.family,
            job=job,
            recipe=Recipe(precision=precision, **recipe),
            optimizer=optimizer,
            cap_bytes=None if cap_gib is None else cap_gib * GIB,
        )


def token_ids(*shape: int, vocabulary: int = 30000) -> Tensor:
    return torch.randint(0, vocabulary, shape)


def padding_mask(batch_size: int, length: int) -> Tensor:
    """Right-padded rows, as in real data: the last position of every row is padding."""
    mask = torch.ones(batch_size, length, dtype=torch.long)
    mask[:, -1] = 0
    return mask


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of a transformers model that takes labels."""
    loss: Tensor = model(**batch).loss
    return loss


def image_batch(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(batch_size, 3, image, image),
        "labels": torch.randint(0, 1000, (batch_size,)),
    }


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Images come as fp32 from any loader; a model cast to half takes them in its own type."""
    images = batch["pixel_values"].to(next(model.parameters()).dtype)
    loss: Tensor = model(pixel_values=images, labels=batch["labels"]).loss
    return loss
