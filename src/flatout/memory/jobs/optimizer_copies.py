"""Copies of optimizers over the parameters of a copied model, without their state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatout.ground.errors import BadInput
from flatout.memory.jobs.example_batch import map_tensors
from flatout.memory.jobs.held_tensors import fresh_tensor, held_tensors


class OptimizerSequence(torch.optim.Optimizer):
    """Steps several optimizers one after another, such as those of a generator and a critic."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = (group for each in optimizers for group in each.param_groups)
        super().__init__(list({id(p): p for group in groups for p in group["params"]}.values()), {})
        self.optimizers = list(optimizers)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for each in self.optimizers:
            each.step()
        return loss


def make_copies_of(
    optimizers: Sequence[torch.optim.Optimizer], model: nn.Module
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return a maker of the same optimizers over a copy's parameters, without their state."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    mine = {id(parameter) for parameter in trainable}
    for optimizer in optimizers:
        if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            raise BadInput(
                f"{type(optimizer).__name__} holds none of the model's trainable parameters",
                hint="make it from model.parameters()",
            )

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = {id(given): its_copy for given, its_copy in zip(trainable, parameters, strict=True)}
        copies = _Copies(made)
        copied = [copies.copy(optimizer) for optimizer in optimizers]
        return copied[0] if len(copied) == 1 else OptimizerSequence(copied)

    return make_optimizer


class _Copies:
    """Copies an optimizer and those it wraps, such as the one that SAM or Lookahead steps."""

    def __init__(self, parameters: Mapping[int, nn.Parameter]) -> None:
        self._parameters = parameters  # by the id of the one they stand for
        self._made: dict[int, Any] = {}  # by the id of what was copied: shared parts stay shared
        self._tensors: dict[int, Tensor] = {}

    def copy(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if id(optimizer) not in self._made:
            like = self._made[id(optimizer)] = object.__new__(type(optimizer))
            for name, value in vars(optimizer).items():
                # A scheduler puts a step of its own here, which would step the optimizer it was made for.
                if not callable(getattr(type(optimizer), name, None)):
                    like.__dict__[name] = self._part(name, value)
        return self._made[id(optimizer)]  # type: ignore[no-any-return]

    def _part(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            return self.copy(value)
        if name == "state":
            return defaultdict(dict)
        if name == "param_groups":
            return self._made.setdefault(id(value), [self._group(group) for group in value])
        if isinstance(value, list | tuple) and any(isinstance(part, torch.optim.Optimizer) for part in value):
            return type(value)(self._part("", part) for part in value)
        return map_tensors(value, self._tensor) if any(held_tensors(value)) else value

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        if id(group) not in self._made:
            copies = [self._parameters[id(p)] for p in group["params"] if id(p) in self._parameters]
            self._made[id(group)] = {**group, "params": copies}
        return self._made[id(group)]  # type: ignore[no-any-return]

    def _tensor(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self._parameters:
            return self._parameters[id(tensor)]
        return self._tensors.setdefault(id(tensor), fresh_tensor(tensor))
