"""One training step, from a batch on the device to the optimizer, that the host only launches.

At width 64 a kernel of this model runs for microseconds, about as long as the host takes to launch it, so
the host's part counts as much as the arithmetic.  Hence nothing in the step waits for the device: loss and
accuracy are summed there and read once per log line.  With `graph` the step is recorded once as a CUDA
graph and launched as one: each batch is copied into the tensors it was recorded with, which needs batches
of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from dataset import TRANSITION, Batch
from fast_model import FastDarkroom, imitation_loss_without_waiting
from torch import Tensor, nn

Logits = Callable[[FastDarkroom, Batch], tuple[Tensor, Tensor, Batch]]  # of action and type, and targets
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

    @property
    def one_shape(self) -> bool:
        """Whether batches must all have one shape: a graph holds one, and each other is compiled anew."""
        return self.graph or self.compile


class FastStep:
    """Call it with a batch to make one training step."""

    def __init__(
        self,
        model: FastDarkroom,
        *,
        levers: Levers,
        lr: float,
        logits: Logits | None = None,
    ) -> None:
        self.model = model
        self._logits = logits or logits_of_one_moment
        self.levers = levers
        self._device = model.positions.device
        if levers.graph and self._device.type != "cuda":
            raise ValueError(f"a CUDA graph needs a CUDA device; the model is on {self._device}")
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, fused=levers.fused or None, capturable=levers.graph
        )
        self._forward = (
            torch.compile(self._loss_and_hits, dynamic=False) if levers.compile else self._loss_and_hits
        )
        self._sums = torch.zeros(3, device=self._device)  # loss, accuracy, steps
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recorded_batch: Batch = {}
        self._num_steps = 0

    def __call__(self, batch: Batch) -> None:
        self._num_steps += 1
        if not self.levers.graph:
            self._whole_step(batch)
            return
        if not self._recorded_batch:
            self._recorded_batch = {name: torch.empty_like(value) for name, value in batch.items()}
        for name, value in batch.items():
            self._recorded_batch[name].copy_(value)
        if self._num_steps <= STEPS_BEFORE_CAPTURE:
            self._warm_up()  # on the very tensors of the recording: others could be compiled for anew
            return
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()

    def metrics(self) -> tuple[float, float]:
        """Mean loss and accuracy since the last call: the only place where the host waits."""
        loss_sum, accuracy_sum, num_steps = self._sums.tolist()
        self._sums.zero_()
        return loss_sum / num_steps, accuracy_sum / num_steps

    def _whole_step(self, batch: Batch) -> None:
        loss, accuracy = self._forward(batch)
        self.optimizer.zero_grad()
        loss.backward()
        if torch.distributed.is_initialized():
            average_gradients(list(self.model.parameters()))
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self._sums += torch.stack([loss.detach(), accuracy, torch.ones_like(accuracy)])

    def _loss_and_hits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        # no cache of casts: each weight is used once per step, and a graph must not keep a stale one
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.levers.bf16, cache_enabled=False):
            action_logits, type_logits, targets = self._logits(self.model, batch)
            loss = imitation_loss_without_waiting(action_logits, type_logits, targets)
        acts: Tensor = targets["target_type"] == TRANSITION
        hits: Tensor = (action_logits.detach().argmax(-1) == targets["target_action"]) & acts
        return loss, hits.sum() / acts.sum().clamp(min=1)

    def _warm_up(self) -> None:
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._whole_step(self._recorded_batch)
        torch.cuda.current_stream(self._device).wait_stream(side)

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()  # the graph allocates gradients of its own
        # a loader that pins memory on a thread of its own must not spoil the recording
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._whole_step(self._recorded_batch)
        return graph


def logits_of_one_moment(model: FastDarkroom, batch: Batch) -> tuple[Tensor, Tensor, Batch]:
    """One answer per sample, as the slow job has it."""
    action_logits, type_logits = model(batch)
    return action_logits, type_logits, batch


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """The mean over ranks: all gradients of this small model in one message."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
