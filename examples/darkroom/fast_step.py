"""One training step, from drawing the batch to the optimizer, that the host only launches.

At width 64 a kernel of this model runs for microseconds, about as long as the host takes to launch it, so
the host's part counts as much as the arithmetic.  Hence nothing in the step waits for the device: loss and
accuracy are summed there and read once per log line.  With `graph` the whole step is recorded once as a
CUDA graph and launched as one; that needs the same shapes in every step, which `fast_data` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from dataset import TRANSITION, Batch
from fast_model import FastDarkroom, imitation_loss_without_waiting
from torch import Tensor, nn

STEPS_BEFORE_CAPTURE = 3  # libraries and the optimizer allocate on first use, which a graph cannot record


@dataclass(frozen=True, kw_only=True, slots=True)
class Levers:
    """What makes the step faster, beside the gather; each can be measured alone."""

    causal: bool = False  # attention told that it is causal: same numbers
    answer_row: bool = False  # the last layer only where it is read: same numbers
    fused: bool = False  # AdamW in one kernel: same up to rounding
    bf16: bool = False  # matrix products in bfloat16: other rounding
    compile: bool = False  # kernels fused by torch.compile: same up to rounding
    graph: bool = False  # one launch per step: same numbers


class FastStep:
    """Call it to make one training step."""

    def __init__(
        self,
        model: FastDarkroom,
        draw: Callable[[], Batch],
        *,
        levers: Levers,
        lr: float,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self.levers = levers
        self._draw, self._before_step = draw, before_step
        self._device = model.positions.device
        if levers.graph and self._device.type != "cuda":
            raise ValueError(f"a CUDA graph needs a CUDA device; the model is on {self._device}")
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, fused=levers.fused or None, capturable=levers.graph
        )
        self._forward = torch.compile(self._loss_and_hits, dynamic=False) if levers.compile else self._loss_and_hits
        self._sums = torch.zeros(3, device=self._device)  # loss, accuracy, steps
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_steps = 0

    def __call__(self) -> None:
        if self._before_step is not None:
            self._before_step()
        self._num_steps += 1
        if not self.levers.graph:
            self._whole_step()
        elif self._num_steps <= STEPS_BEFORE_CAPTURE:
            self._warm_up()
        else:
            if self._graph is None:
                self._graph = self._captured()
            self._graph.replay()

    def metrics(self) -> tuple[float, float]:
        """Mean loss and accuracy since the last call: the only place where the host waits."""
        loss_sum, accuracy_sum, num_steps = self._sums.tolist()
        self._sums.zero_()
        return loss_sum / num_steps, accuracy_sum / num_steps

    def _whole_step(self) -> None:
        batch = self._draw()
        loss, accuracy = self._forward(batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if torch.distributed.is_initialized():
            average_gradients(list(self.model.parameters()))
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self._sums += torch.stack([loss.detach(), accuracy, torch.ones_like(accuracy)])

    def _loss_and_hits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        # no cache of casts: each weight is used once per step, and a graph must not keep a stale one
        with torch.autocast(
            self._device.type, torch.bfloat16, enabled=self.levers.bf16, cache_enabled=False
        ):
            action_logits, type_logits = self.model(batch)
            loss = imitation_loss_without_waiting(action_logits, type_logits, batch)
        acts: Tensor = batch["target_type"] == TRANSITION
        hits: Tensor = (action_logits.detach().argmax(-1) == batch["target_action"]) & acts
        return loss, hits.sum() / acts.sum().clamp(min=1)

    def _warm_up(self) -> None:
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._whole_step()
        torch.cuda.current_stream(self._device).wait_stream(side)

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()  # the graph allocates gradients of its own
        with torch.cuda.graph(graph):
            self._whole_step()
        return graph


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """The mean over ranks: all gradients of this small model in one message."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
