"""Optimizers as scripts write them: groups, a schedule, a slow copy of the weights, and two of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def adamw_in_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay; biases and the weights of norms do not."""
    matrices = [each for each in parameters if each.dim() > 1]
    vectors = [each for each in parameters if each.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}], lr=1e-4
    )


def adamw_with_schedule(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The rate and the first beta follow one cycle, moved on after each step."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=1000)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def adamw_with_averages(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A slow copy of all weights follows them after each step."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    slow = [each.detach().clone() for each in parameters]

    def follow(*_: Any) -> None:
        torch._foreach_lerp_(slow, [each.detach() for each in parameters], 1e-3)

    optimizer.register_step_post_hook(follow)
    return optimizer


class Lion(torch.optim.Optimizer):
    """The sign of a moving average, one state for each weight."""

    def __init__(self, parameters: list[nn.Parameter], *, lr: float = 1e-5) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["average"] = torch.zeros_like(weight)
                average = state["average"]
                weight.mul_(1 - group["lr"] * 0.1)
                moved = average.mul(0.9).add_(weight.grad, alpha=0.1).sign_()
                weight.add_(moved, alpha=-group["lr"])
                average.mul_(0.99).add_(weight.grad, alpha=0.01)


class MuonOrAdam(torch.optim.Optimizer):
    """Matrices move along an orthogonal matrix near their momentum; the rest and large tables as in Adam."""

    def __init__(self, parameters: list[nn.Parameter], *, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                is_matrix = weight.dim() == 2 and max(weight.shape) < 8192
                if not state:
                    state["first"] = torch.zeros_like(weight)
                    if not is_matrix:
                        state["second"] = torch.zeros_like(weight)
                first = state["first"].lerp_(weight.grad, 0.1)
                if is_matrix:
                    weight.add_(orthogonal(weight.grad.lerp(first, 0.9)).to(weight.dtype), alpha=-group["lr"])
                else:
                    second = state["second"].mul_(0.95).addcmul_(weight.grad, weight.grad, value=0.05)
                    weight.addcdiv_(first, second.sqrt().add_(1e-8), value=-group["lr"])


def orthogonal(matrix: Tensor, *, rounds: int = 5) -> Tensor:
    """Newton and Schulz's iteration, in bfloat16."""
    x = matrix.bfloat16()
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
