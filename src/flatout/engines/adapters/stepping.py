"""One training step for all adapters: a forward, a loss per task, one backward, an update per adapter.

The losses of all tasks are summed and go back at once.  A task's loss reaches only the tokens of its own
rows, and those reach only its own adapter, so the sum's gradient is every task's gradient: this is training
each alone, in one pass.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flatout.decisions import Decision
from flatout.engines.adapters import graphs
from flatout.engines.adapters.blocks import shapes_of
from flatout.engines.adapters.encoder import PackedEncoder
from flatout.engines.adapters.optimizer import SHARED as SHARED
from flatout.engines.adapters.optimizer import AdapterOptimizer as AdapterOptimizer
from flatout.engines.adapters.optimizer import StepSettings as StepSettings
from flatout.errors import BadInput

GRAPH_TOKENS = 65_536  # tokens of a step beyond which its kernels outlast their launches: assumed
SEEN_BEFORE = 1  # times that shapes must have occurred before they are worth recording
KEPT_GRAPHS = 24
KEPT_COUNTS = 4096  # shapes whose occurrences are counted
CPU_STATES = 131_072  # numbers in the states of one pass on a CPU: more leave the caches (measured)


class FusedStep:
    """A call trains every adapter that has a batch; each `accumulation` calls make one update.

    `loss(adapter, states, batch)` is the mean loss of one task's batch.  A batch is a dataclass with a
    `block` (Block); its tensors and dicts of tensors are the inputs of the step.  `reduce` is given the
    gradients before each update, for processes that train together.
    """

    def __init__(
        self,
        encoder: PackedEncoder,
        *,
        optimizer: AdapterOptimizer,
        loss: Callable[[int, Tensor, Any], Tensor],
        accumulation: int = 1,
        graph: Literal["auto", "on", "off"] = "auto",
        reduce: Callable[[list[Tensor]], None] | None = None,
    ) -> None:
        if encoder.bank is None or encoder.bank is not optimizer.bank:
            raise BadInput("the encoder and the optimizer have different banks", hint="make both with one")
        self.encoder, self.bank, self.optimizer = encoder, encoder.bank, optimizer
        self._loss, self._accumulation, self._reduce = loss, accumulation, reduce
        self._micro = 0
        self._present: set[str] = set()  # adapters with a batch since the last update
        self._seen: Counter[object] = Counter()
        self._graphs: OrderedDict[object, graphs.Captured] = OrderedDict()
        self._pool: Any = None
        self._wish = graph
        self.decision = self._first_decision()

    def __call__(self, batches: Sequence[Any]) -> Tensor:
        """Losses [adapters] on the device; NaN for those without a batch."""
        numbers = [batch.block.adapter for batch in batches]
        if not numbers or sorted(set(numbers)) != numbers:
            raise BadInput(f"batches of adapters {numbers}", hint="give one per adapter, in their order")
        self._present |= {self.bank.names[number] for number in numbers}
        self._micro += 1
        updates = self._micro == self._accumulation
        if updates:
            self.optimizer.write_rates()
        losses = self._run(batches, updates=updates)
        if updates:
            self.optimizer.count(self._present)
            self._micro, self._present = 0, set()
        return losses

    def _run(self, batches: Sequence[Any], *, updates: bool) -> Tensor:
        if self.decision.value == "eager":
            return self._eager(batches, updates=updates)
        present = tuple(sorted(self._present)) if updates else ()
        key = (graphs.signature(batches), present, updates)
        captured = self._graphs.get(key)
        if captured is None:
            if len(self._seen) >= KEPT_COUNTS:
                self._seen.clear()
            self._seen[key] += 1
            tokens = sum(batch.block.num_tokens for batch in batches)
            if self._seen[key] <= SEEN_BEFORE or (self._wish == "auto" and tokens > GRAPH_TOKENS):
                return self._eager(batches, updates=updates)
            captured = self._capture(batches, updates=updates)
            if captured is None:
                return self._eager(batches, updates=updates)
            self._graphs[key] = captured
            if len(self._graphs) > KEPT_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return captured.replay(batches)

    def _eager(self, batches: Sequence[Any], *, updates: bool) -> Tensor:
        losses = [loss for part in self._parts(batches) for loss in self._backward(part)]
        if updates:
            if self._reduce is not None:
                self._reduce(self.optimizer.gradients(self._present))
            self.optimizer.update(self._present)
        return self._by_adapter(batches, torch.stack(losses))

    def _parts(self, batches: Sequence[Any]) -> list[list[Any]]:
        """The batches of each pass: all in one on a GPU, and no more than its caches hold on a CPU."""
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

    def _backward(self, batches: Sequence[Any]) -> list[Tensor]:
        """One pass forwards and backwards; the losses, detached."""
        states = self.encoder(tuple(batch.block for batch in batches), dropout=True)
        half = self.encoder.dtype != torch.float32
        # A cast that autocast keeps for later would belong to the graph that made it.
        with torch.autocast(
            self.encoder.device.type,
            dtype=self.encoder.dtype if half else torch.bfloat16,
            enabled=half,
            cache_enabled=False,
        ):
            losses = [
                self._loss(batch.block.adapter, state, batch).float()
                for batch, state in zip(batches, states, strict=True)
            ]
        names = [self.bank.names[batch.block.adapter] for batch in batches]
        parts = [self.optimizer.scaled(name, loss) for name, loss in zip(names, losses, strict=True)]
        total = torch.stack(parts).sum()
        (total if self._accumulation == 1 else total / self._accumulation).backward()
        return [loss.detach() for loss in losses]

    def _by_adapter(self, batches: Sequence[Any], losses: Tensor) -> Tensor:
        if len(batches) == len(self.bank):
            return losses
        every = losses.new_full((len(self.bank),), float("nan"))
        for place, batch in enumerate(batches):
            every[batch.block.adapter] = losses[place]
        return every

    def _capture(self, batches: Sequence[Any], *, updates: bool) -> graphs.Captured | None:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        kept = self.encoder.prepare(shapes_of(tuple(batch.block for batch in batches)))
        try:
            return graphs.capture(
                lambda fixed: self._eager(fixed, updates=updates),
                batches,
                device=self.encoder.device,
                pool=self._pool,
                kept=kept,
            )
        except RuntimeError as error:  # a loss that asks the device for a number cannot be recorded
            reason = str(error).splitlines()[0]
            self.decision = Decision(
                value="eager", reason=f"the step cannot be recorded: {reason}", source="measured"
            )
            return None

    def _first_decision(self) -> Decision[str]:
        reason = None
        if self.encoder.device.type != "cuda":
            reason = "CUDA graphs need a GPU"
        elif self._wish == "off":
            reason = "graphs are turned off"
        elif self.optimizer.scales_losses:
            reason = "loss scaling reads a flag of the device at every update"
        elif self._reduce is not None:
            reason = "the processes exchange gradients at every update"
        if reason is not None:
            return Decision(value="eager", reason=reason, source="computed")
        return Decision(
            value="graph",
            reason=f"shapes that occur again are recorded, up to {GRAPH_TOKENS} tokens a step",
            source="assumed",
        )
