"""A training job as the planner sees it: how to make its parts, and how one step of it goes.

The same `Job` and `Recipe` are stepped by the trace (on tensors without data), by the probe (a short real
run) and by the benchmark (the measured truth), so that a prediction and a measurement mean the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "pure-bf16"]
Mode = Literal["train", "evaluate", "generate"]
StepPhase = Literal["setup", "forward", "backward", "optimizer"]
Sizes = Mapping[str, int]  # "batch_size", often "length", and any knob of the job's own, such as "negatives"
PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "tf32", "bf16", "fp16", "pure-bf16")


def is_number(value: object) -> bool:
    """Return whether it is a finite number; what callers pass is not checked by types."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_batch_size(batch_size: int, *, of: str) -> None:
    if batch_size < 1:
        raise BadInput(f"batch_size={batch_size} of {of}: a step needs at least one sample")


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4)


def optimizer_named(name: str) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None:
    """Return the optimizer a config calls `name` (Hugging Face or torch spelling), or None.

    Adam in eight bits is planned by its arithmetic, with or without bitsandbytes (`eight_bit_adam`).
    """
    import torch

    word = name.casefold().removeprefix("torch.optim.")
    if word in ("adamw", "adamw_torch"):
        return adamw
    if word == "adamw_torch_fused":
        return lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    from flatout.memory.jobs.eight_bit_adam import eight_bit_named

    if (made := eight_bit_named(word)) is not None:
        return made
    plain = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    plain |= {"rmsprop": torch.optim.RMSprop}
    kind = plain.get(word)
    return None if kind is None else lambda parameters: kind(parameters, lr=1e-4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """`make_batch(**sizes)` gives one micro-batch of CPU tensors; `loss(model, batch)` a scalar."""

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[..., Any]
    loss: Callable[[nn.Module, Any], Tensor]
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw  # of what is trainable
    sizes: Sizes = field(default_factory=lambda: {"batch_size": 8})
    true_share: float = 1.0  # of a mask that depends on floating-point data: how much of it is true at most

    def __post_init__(self) -> None:
        if not 0 < self.true_share <= 1:
            raise BadInput(f"true_share={self.true_share} of {self.name} must be above 0 and at most 1")
        if "batch_size" not in self.sizes:
            raise BadInput(f"the sizes of {self.name} lack batch_size: {dict(self.sizes)}")
        check_batch_size(self.sizes["batch_size"], of=self.name)
        if type(self.loss).__module__ == "torch.nn.modules.loss":
            kind = type(self.loss).__name__
            raise BadInput(
                f"the loss of {self.name} is {kind}, which takes outputs and targets, not (model, batch)",
                hint=f"give loss=lambda model, batch: {kind}()(model(batch[0]), batch[1])",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How the job is stepped.  fp16 brings a gradient scaler; pure-bf16 casts the model itself."""

    precision: PrecisionName = "fp32"
    accumulation: int = 1
    clip_norm: float | None = None
    checkpointing: bool = False  # through the model's own `gradient_checkpointing_enable`
    mode: Mode = "train"
    new_tokens: int = 0  # of "generate": how many a key-value cache grows to beyond the prompt

    def __post_init__(self) -> None:
        errors = []
        if self.precision not in PRECISIONS:
            errors.append(f"precision={self.precision!r} is not one of {', '.join(PRECISIONS)}")
        if not is_count(self.accumulation):
            errors.append(f"accumulation={self.accumulation!r} must be a whole number of at least 1")
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            errors.append(f"clip_norm={self.clip_norm!r} must be a positive number")
        if not (is_count(self.new_tokens) or self.new_tokens == 0):
            errors.append(f"new_tokens={self.new_tokens!r} must be a whole number, not negative")
        if errors:
            raise BadInput("; ".join(errors))
