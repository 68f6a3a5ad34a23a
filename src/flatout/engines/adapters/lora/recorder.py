"""When a step is recorded as a CUDA graph, and when it is run operator by operator.

Recording pays where the same shapes come again, so shapes are counted first; the first time they run eagerly,
which a recording needs anyway.  Steps whose kernels outlast their launches gain nothing.  What cannot be
recorded runs eagerly, and the decision says why.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flatout.decisions import Decision
from flatout.engines.adapters.lora import graphs
from flatout.engines.adapters.lora.blocks import shapes_of
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.optimizer import AdapterOptimizer

GRAPH_TOKENS = 65_536  # tokens of a step beyond which its kernels outlast their launches: assumed
SEEN_BEFORE = 1  # times that shapes must have occurred before they are worth recording
KEPT_GRAPHS = 48  # joint training has six kinds of batches, each in as many shapes as there are buckets
KEPT_COUNTS = 4096  # shapes whose occurrences are counted


class Recorder:
    """Runs steps of one kind on batches with a `block`: eagerly, or as the graph of their shapes."""

    def __init__(
        self,
        encoder: PackedEncoder,
        *,
        optimizer: AdapterOptimizer,
        graph: Literal["auto", "on", "off"] = "auto",
        exchanges: bool = False,
    ) -> None:
        self._encoder, self._wish = encoder, graph
        self._seen: Counter[Hashable] = Counter()
        self.graphs: OrderedDict[Hashable, graphs.Captured] = OrderedDict()
        self._pool: Any = None
        reason = None
        if encoder.device.type != "cuda":
            reason = "CUDA graphs need a GPU"
        elif graph == "off":
            reason = "graphs are turned off"
        elif optimizer.scales_losses:
            reason = "loss scaling reads a flag of the device at every update"
        elif exchanges:
            reason = "the processes exchange gradients at every update"
        self.decision: Decision[str] = (
            Decision(
                value="graph",
                reason=f"shapes that occur again are recorded, up to {GRAPH_TOKENS} tokens a step",
                source="assumed",
            )
            if reason is None
            else Decision(value="eager", reason=reason, source="computed")
        )

    def __call__(
        self, step: Callable[[Sequence[Any]], Tensor], batches: Sequence[Any], *, key: Hashable
    ) -> Tensor:
        """What `step` gives for these batches; `key` tells steps apart that differ in more than shapes."""
        if self.decision.value == "eager":
            return step(batches)
        whole = (graphs.signature(batches), key)
        captured = self.graphs.get(whole)
        if captured is None:
            if len(self._seen) >= KEPT_COUNTS:
                self._seen.clear()
            self._seen[whole] += 1
            tokens = sum(batch.block.num_tokens for batch in batches)
            if self._seen[whole] <= SEEN_BEFORE or (self._wish == "auto" and tokens > GRAPH_TOKENS):
                return step(batches)
            captured = self._capture(step, batches)
            if captured is None:
                return step(batches)
            self.graphs[whole] = captured
            if len(self.graphs) > KEPT_GRAPHS:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(whole)
        return captured.replay(batches)

    def _capture(
        self, step: Callable[[Sequence[Any]], Tensor], batches: Sequence[Any]
    ) -> graphs.Captured | None:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        kept = self._encoder.prepare(shapes_of(tuple(batch.block for batch in batches)))
        try:
            return graphs.capture(step, batches, device=self._encoder.device, pool=self._pool, kept=kept)
        except RuntimeError as error:  # a loss that asks the device for a number cannot be recorded
            reason = str(error).splitlines()[0]
            self.decision = Decision(
                value="eager", reason=f"the step cannot be recorded: {reason}", source="measured"
            )
            return None
