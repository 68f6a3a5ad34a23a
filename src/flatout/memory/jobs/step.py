"""One training step of a `Job`, the same for tensors with and without data.

The order is that of a plain training loop: gradients of the last step are dropped (to None), then forward
and backward per micro-batch, then unscaling, clipping and the optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatout.ground.errors import BadInput
from flatout.memory.jobs.job import Job, Recipe, StepPhase

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True, slots=True)
class Parts:
    """What outlives a step: model, optimizer, scaler."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    scaler: Any | None  # torch.amp.GradScaler


def make_parts(job: Job, recipe: Recipe, *, device: str) -> Parts:
    """Make model, optimizer and scaler on `device`, ready for the first step."""
    with torch.device(device):
        model = job.make_model()
    for wrapper in (each.__name__ for each in type(model).__mro__ if each.__name__ in WRAPPERS):
        raise BadInput(
            f"the model is wrapped by {wrapper}, which needs its process group",
            hint="give the model as it is before; --ranks (ranks=, parallel=) plans what wrapping changes",
        )
    model.to(device)
    if recipe.precision == "pure-bf16":
        model.to(torch.bfloat16)
    if recipe.checkpointing:
        _enable_checkpointing(model, job.name)
    if recipe.mode != "train":
        return Parts(model=model.eval(), optimizer=None, scaler=None)
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise BadInput(
            f"{job.name} has no parameter that requires a gradient",
            hint="unfreeze some",
        )
    optimizer = job.make_optimizer(trainable)
    _check_step(optimizer)
    scaler = torch.amp.GradScaler(device) if recipe.precision == "fp16" else None
    return Parts(model=model, optimizer=optimizer, scaler=scaler)


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that computes the loss itself, such as L-BFGS: how often depends on the data."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise BadInput(
            f"{name} computes the loss inside its step, a number of times that depends on the data",
            hint=f"plan with another optimizer, and add the state that {name} keeps",
        )


def _enable_checkpointing(model: nn.Module, name: str) -> None:
    # transformers 5.23 gave the method its second name, and warns at the first.
    for kind in ("activation", "gradient"):
        enable = getattr(model, f"{kind}_checkpointing_enable", None)
        if enable is not None:
            enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
            return
    raise BadInput(
        f"{name} has no gradient_checkpointing_enable, so checkpointing cannot be switched on",
        hint="give the model that method, or plan without checkpointing",
    )


def autocast(recipe: Recipe, *, device: str) -> AbstractContextManager[Any]:
    dtype = AUTOCAST.get(recipe.precision)
    return torch.autocast(device, dtype=dtype) if dtype is not None else nullcontext()


def run_step(
    parts: Parts,
    job: Job,
    recipe: Recipe,
    batch: Any,
    *,
    device: str,
    keep_gradients: bool = False,
    mark: Callable[[StepPhase], None] = lambda phase: None,
) -> None:
    """Run one step on `batch`, which is already on the device; accumulation uses it again and again.

    With `keep_gradients` it is the last micro-batch of a step: it adds to the gradients that are there.
    """
    mark("forward")
    if recipe.mode != "train":
        _run_without_gradients(parts, job, recipe, batch, device=device)
        return
    assert parts.optimizer is not None
    if not keep_gradients:
        parts.optimizer.zero_grad(set_to_none=True)
    for _ in range(recipe.accumulation):
        mark("forward")
        with autocast(recipe, device=device):
            loss = _checked_loss(job.loss(parts.model, batch), name=job.name)
            if recipe.accumulation > 1:
                loss = loss / recipe.accumulation
        mark("backward")
        if parts.scaler is not None:
            loss = parts.scaler.scale(loss)
        loss.backward()
        del loss
    mark("optimizer")
    _update(parts, recipe)


def _checked_loss(loss: Any, *, name: str) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    returned = f"a {type(loss).__name__}"
    if isinstance(loss, torch.Tensor):
        is_one = loss.numel() == 1
        returned = "a tensor that no trained weight reaches" if is_one else f"a tensor of {tuple(loss.shape)}"
    raise BadInput(
        f"the loss of {name} returned {returned if loss is not None else 'None'}",
        hint="return one number as a tensor that backward can start from",
    )


def _update(parts: Parts, recipe: Recipe) -> None:
    assert parts.optimizer is not None
    if recipe.clip_norm is not None:
        if parts.scaler is not None:
            parts.scaler.unscale_(parts.optimizer)
        trainable = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
        nn.utils.clip_grad_norm_(trainable, recipe.clip_norm)
    if parts.scaler is not None:
        parts.scaler.step(parts.optimizer)
        parts.scaler.update()
    else:
        parts.optimizer.step()


def _run_without_gradients(parts: Parts, job: Job, recipe: Recipe, batch: Any, *, device: str) -> None:
    if recipe.mode == "evaluate":
        _evaluate(parts, job, recipe, batch, device=device)
        return
    with torch.no_grad(), autocast(recipe, device=device):
        _generate(parts.model, batch, new_tokens=recipe.new_tokens)


def _evaluate(parts: Parts, job: Job, recipe: Recipe, batch: Any, *, device: str) -> None:
    """Compute the loss without gradients; one that itself differentiates (a penalty, forces) needs them."""
    try:
        with torch.no_grad(), autocast(recipe, device=device):
            job.loss(parts.model, batch)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    else:
        return
    with autocast(recipe, device=device):
        job.loss(parts.model, batch)


def _generate(model: nn.Module, batch: Any, *, new_tokens: int) -> None:
    generate = getattr(model, "generate", None)
    if generate is None or not isinstance(batch, dict) or "input_ids" not in batch:
        raise BadInput(
            "generation can be planned only for a model with generate() and batches with input_ids",
            hint="plan the evaluation instead",
        )
    prompt = {name: value for name, value in batch.items() if name in ("input_ids", "attention_mask")}
    generate(**prompt, min_new_tokens=new_tokens, max_new_tokens=new_tokens, do_sample=False)
