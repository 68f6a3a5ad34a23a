"""One training step for all adapters: a forward, a loss per task, one backward, an update per adapter.

The losses of all tasks are summed for one backward.  A task's loss reaches only the tokens of its own rows,
and those reach only its own adapter, so the sum has every task's gradient: each trains as if alone, in one
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.gradient_sum import GradientSum, Total
from flatout.engines.adapters.lora.optimizer import SHARED as SHARED
from flatout.engines.adapters.lora.optimizer import AdapterOptimizer as AdapterOptimizer
from flatout.engines.adapters.lora.optimizer import StepSettings as StepSettings
from flatout.engines.adapters.lora.recorder import Recorder
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput

CPU_STATES = 131_072  # numbers in the states of one pass on a CPU: more do not fit its caches (measured)


class FusedStep:
    """A call trains every adapter that has a batch; each `accumulation` calls make one update.

    `num_batches` are those of an update in all processes, over which `total` sums the gradients.

    `loss(adapter, states, batch)` is the mean loss of one task's batch.  A batch is a dataclass with a
    `block` (Block); its tensors and dicts of tensors are the inputs of the step.
    """

    def __init__(
        self,
        encoder: PackedEncoder,
        *,
        optimizer: AdapterOptimizer,
        loss: Callable[[int, Tensor, Any], Tensor],
        accumulation: int = 1,
        num_batches: int | None = None,
        graph: Literal["auto", "on", "off"] = "auto",
        total: Total | None = None,
    ) -> None:
        if encoder.bank is None or encoder.bank is not optimizer.bank:
            raise BadInput("the encoder and the optimizer have different banks", hint="make both with one")
        self.encoder, self.bank, self.optimizer = encoder, encoder.bank, optimizer
        self._loss, self._accumulation, self._num_batches = loss, accumulation, num_batches or accumulation
        self._sum = GradientSum.where_needed(accumulation=accumulation, device=encoder.device, total=total)
        self._micro = 0
        self._present: set[str] = set()  # adapters with a batch since the last update
        self._recorder = Recorder(encoder, optimizer=optimizer, graph=graph, exchanges=total is not None)
        self._graphs = self._recorder.graphs
        self._bad = torch.zeros(len(self.bank), device=encoder.device)  # calls in a row without a finite loss
        self._bad_of = self._bad.unbind()
        self._zero = torch.zeros((), device=encoder.device, dtype=encoder.dtype)

    @property
    def decision(self) -> Decision[str]:
        """Whether steps are recorded."""
        return self._recorder.decision

    def num_not_finite(self) -> dict[str, int]:
        """Count the latest calls in a row in which an adapter's loss was not finite.

        Waits for the device.
        """
        return {name: int(count) for name, count in zip(self.bank.names, self._bad.tolist(), strict=True)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimizer's state and the counts kept here, at an update."""
        tensors, numbers = self.optimizer.state()
        return tensors, {**numbers, "not_finite": self.num_not_finite()}

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.optimizer.load_state(tensors, numbers)
        counts = numbers.get("not_finite", {})
        self._bad.copy_(torch.tensor([float(counts.get(name, 0)) for name in self.bank.names]))

    def __call__(self, batches: Sequence[Any]) -> Tensor:
        """Run a step; return the losses [adapters] on the device, NaN for adapters without a batch."""
        numbers = [batch.block.adapter for batch in batches]
        if not numbers or sorted(set(numbers)) != numbers:
            raise BadInput(
                f"the batches belong to the adapters {numbers}",
                hint="give at most one batch per adapter, in their order",
            )
        self._present |= {self.bank.names[number] for number in numbers}
        self._micro += 1
        updates = self._micro == self._accumulation
        if updates:
            self.optimizer.write_rates()
        losses = self._recorder(
            lambda given: self._eager(given, updates=updates),
            batches,
            key=tuple(sorted(self._present)) if updates else None,
        )
        if updates:
            self.optimizer.count(self._present)
            self._micro, self._present = 0, set()
        return losses

    def _eager(self, batches: Sequence[Any], *, updates: bool) -> Tensor:
        done = [self._backward(part) for part in self._parts(batches)]
        losses = done[0] if len(done) == 1 else torch.cat(done)
        self._count_bad(batches, losses)
        if self._sum is not None:
            self._sum.add(self.optimizer.gradients(self._present), last=updates)
        if updates:
            self.optimizer.update(self._present)
        return self._by_adapter(batches, losses)

    def _count_bad(self, batches: Sequence[Any], losses: Tensor) -> None:
        """Count, on the device, calls without a finite loss; a finite one resets the count."""
        own = [self._bad_of[batch.block.adapter] for batch in batches]
        torch._foreach_add_(own, 1.0)
        torch._foreach_mul_(own, list(_is_bad(losses).float().unbind()))

    def _parts(self, batches: Sequence[Any]) -> list[list[Any]]:
        """Split batches into passes: one on a GPU; on a CPU, as much as its caches hold in each."""
        if self.encoder.device.type == "cuda":
            return [list(batches)]
        parts: list[list[Any]] = []
        tokens, most = 0, CPU_STATES // self.encoder.width
        for batch in batches:
            if not parts or tokens + batch.block.num_tokens > most:
                parts.append([])
                tokens = 0
            parts[-1].append(batch)
            tokens += batch.block.num_tokens
        return parts

    def _backward(self, batches: Sequence[Any]) -> Tensor:
        """Run one pass forwards and backwards; return the detached losses [batches]."""
        states = self.encoder(tuple(batch.block for batch in batches), dropout=True)
        with half_precision(self.encoder):
            losses = [
                self._loss(batch.block.adapter, state, batch).float()
                for batch, state in zip(batches, states, strict=True)
            ]
        found = torch.stack(losses)
        self._guard(states, found.detach())
        if self.optimizer.scales_losses:
            names = [self.bank.names[batch.block.adapter] for batch in batches]
            total = torch.stack(
                [self.optimizer.scaled(*pair) for pair in zip(names, losses, strict=True)]
            ).sum()
        else:
            total = found.sum()
        (total if self._num_batches == 1 else total / self._num_batches).backward()
        return found.detach()

    def _guard(self, states: Sequence[Tensor], losses: Tensor) -> None:
        """Keep the gradient of a loss that is not finite out of the encoder.

        Dense products multiply the rows of other tasks by zero there, and zero times NaN is NaN: one task
        would spoil the step of all.
        """
        if not states[0].requires_grad:  # heads alone
            return
        for state, is_bad in zip(states, _is_bad(losses).unbind(), strict=True):
            state.register_hook(partial(_unless, is_bad, self._zero))

    def _by_adapter(self, batches: Sequence[Any], losses: Tensor) -> Tensor:
        if len(batches) == len(self.bank):
            return losses
        every = losses.new_full((len(self.bank),), float("nan"))
        for place, batch in enumerate(batches):
            every[batch.block.adapter] = losses[place]
        return every


def _is_bad(losses: Tensor) -> Tensor:
    """Return True where a loss is not finite, in two kernels; isfinite takes four."""
    return (losses - losses).isnan()


def _unless(is_bad: Tensor, zero: Tensor, gradient: Tensor) -> Tensor:
    return torch.where(is_bad, zero, gradient)


def half_precision(encoder: PackedEncoder) -> torch.autocast:
    """Return the autocast for heads and losses: the encoder's precision where that is half."""
    half = encoder.dtype != torch.float32
    # A cast that autocast caches would belong to the graph that made it.
    return torch.autocast(
        encoder.device.type,
        dtype=encoder.dtype if half else torch.bfloat16,
        enabled=half,
        cache_enabled=False,
    )
