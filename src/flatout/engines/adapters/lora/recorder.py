"""A training step recorded once as a CUDA graph and replayed for every batch of the same shapes.

A small step is bound by the host, which launches a thousand kernels of a few microseconds each.  A graph
launches them at once.  It reads its inputs from fixed addresses, so a batch is first copied there in a few
kernels; everything else that a step reads and writes (factors, gradients, moments, learning rates) has a
fixed address anyway.

Recording pays for shapes that occur again, so shapes are counted; the first time they run eagerly, which a
recording needs anyway.  Steps whose kernels outlast their launches gain nothing.  A step that cannot be
recorded runs eagerly, and the decision says why.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.optimizer import AdapterOptimizer
from flatout.engines.adapters.lora.token_blocks import shapes_of
from flatout.ground.codec import fields_of
from flatout.ground.decisions import Decision
from flatout.measure.lines.live_objects import without_collection

GRAPH_TOKENS = 65_536  # tokens of a step beyond which its kernels outlast their launches: assumed
SEEN_BEFORE = 1  # times that shapes must have occurred before they are worth recording
KEPT_GRAPHS = 48  # joint training has six kinds of batches, each in as many shapes as there are buckets
KEPT_COUNTS = 4096  # shapes whose occurrences are counted
ATTEMPTS = 2  # failed recordings before all steps run eagerly

StepFunction = Callable[[Sequence[Any]], Tensor]


def tensors_of(batch: Any, prefix: str = "") -> dict[str, Tensor]:
    """Collect the tensors of a batch, of its dataclasses and dicts, by their place in it."""
    found: dict[str, Tensor] = {}
    for name, value in _parts(batch).items():
        if isinstance(value, Tensor):
            found[prefix + name] = value
        elif isinstance(value, dict) or dataclasses.is_dataclass(value):
            found |= tensors_of(value, f"{prefix}{name}.")
    return found


def with_tensors(batch: Any, tensors: dict[str, Tensor], prefix: str = "") -> Any:
    """Return the batch with other tensors in the places that `tensors_of` names."""
    changes: dict[str, Any] = {}
    for name, value in _parts(batch).items():
        if isinstance(value, Tensor):
            changes[name] = tensors[prefix + name]
        elif isinstance(value, dict) or dataclasses.is_dataclass(value):
            changes[name] = with_tensors(value, tensors, f"{prefix}{name}.")
    return {**batch, **changes} if isinstance(batch, dict) else dataclasses.replace(batch, **changes)


def _parts(batch: Any) -> dict[str, Any]:
    return batch if isinstance(batch, dict) else fields_of(batch)


def signature(batches: Sequence[Any]) -> Hashable:
    """Return what must be equal for two lists of batches to share a graph."""
    return tuple(
        (
            batch.block.adapter,
            tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors_of(batch).items()),
        )
        for batch in batches
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A recorded step: its inputs, its result, and what it reads that must not be freed."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    losses: Tensor
    kept: object

    def replay(self, batches: Sequence[Any]) -> Tensor:
        """Run the step on these batches; the losses are the caller's own."""
        given = [tensor for batch in batches for tensor in tensors_of(batch).values()]
        torch._foreach_copy_(self.inputs, given, non_blocking=True)
        self.graph.replay()
        return self.losses.clone()


def capture(
    step: StepFunction, batches: Sequence[Any], *, device: torch.device, pool: Any, kept: object
) -> Captured:
    """Record `step` on copies of these batches; nothing is computed until it is replayed.

    The step must have run before with batches of these shapes: what libraries and optimizers make on first
    use cannot be made while recording.
    """
    own = [
        {name: tensor.to(device).clone() for name, tensor in tensors_of(batch).items()} for batch in batches
    ]
    fixed = [with_tensors(batch, tensors) for batch, tensors in zip(batches, own, strict=True)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    stream, drawn = torch.cuda.current_stream(device), torch.cuda.get_rng_state(device)
    # In this mode only this thread's calls can break the recording: a loader that pins memory, or a monitor,
    # may run in another thread.
    recording = torch.cuda.graph(
        graph, pool=pool, stream=_recording_stream(device), capture_error_mode="thread_local"
    )
    try:
        # destroying a graph, an event or pinned memory would break a recording
        with without_collection(), recording:
            losses = step(fixed)
    except RuntimeError:
        torch.cuda.set_stream(stream)  # a failed recording leaves its own stream current
        _draw_on(device, drawn)
        raise
    return Captured(
        graph=graph,
        inputs=[tensor for tensors in own for tensor in tensors.values()],
        losses=losses,
        kept=kept,
    )


def _draw_on(device: torch.device, drawn: Tensor) -> None:
    """Continue random numbers from `drawn`: a failed recording leaves the generator in capture mode."""
    fresh = torch.Generator(device)
    fresh.set_state(drawn)
    number = torch.empty(0, device=device).get_device()
    torch.cuda.default_generators[number].graphsafe_set_state(fresh)


@functools.cache
def _recording_stream(device: torch.device) -> Any:
    """Make a stream of high priority, so that work on other streams (`side_stream`) takes what it leaves."""
    return torch.cuda.Stream(device, priority=-1)


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
        self.graphs: OrderedDict[Hashable, Captured] = OrderedDict()
        self._pool: Any = None
        self._failures = 0
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

    def __call__(self, step: StepFunction, batches: Sequence[Any], *, key: Hashable) -> Tensor:
        """Run `step` on these batches; `key` separates steps that differ in more than shapes."""
        if self.decision.value == "eager":
            return step(batches)
        whole = (signature(batches), key)
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

    def _capture(self, step: StepFunction, batches: Sequence[Any]) -> Captured | None:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        kept = self._encoder.prepare(shapes_of(tuple(batch.block for batch in batches)))
        try:
            return capture(step, batches, device=self._encoder.device, pool=self._pool, kept=kept)
        except RuntimeError as error:
            # A loss that reads a number from the device breaks every recording; another cause may pass.
            self._failures += 1
            self._pool = None
            if self._failures >= ATTEMPTS:
                reason = f"the step cannot be recorded: {str(error).splitlines()[0]}"
                self.decision = Decision(value="eager", reason=reason, source="measured")
            return None
