"""A training step recorded once as a CUDA graph and replayed for every batch of the same shapes.

A small step is bound by the host: a thousand kernels of a few microseconds each, and each must be launched.
A graph launches them at once.  It reads its inputs from fixed addresses, so a batch is first copied there,
all its tensors in a few kernels; everything else that a step reads and writes (factors, gradients, moments,
learning rates) has its fixed address anyway.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.engines.adapters.lora.blocks import Block

Signature = tuple[object, ...]


def signature(batches: Sequence[Any]) -> Signature:
    """What must be equal for two lists of batches to share a graph."""
    return tuple(
        (
            batch.block.adapter,
            tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors_of(batch).items()),
        )
        for batch in batches
    )


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """All tensors of a batch, a dataclass with a `block`, by where they are."""
    found: dict[str, Tensor] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            found[field.name] = value
        elif isinstance(value, dict):
            found |= {f"{field.name}.{key}": one for key, one in value.items() if isinstance(one, Tensor)}
        elif isinstance(value, Block):
            found |= {f"{field.name}.ids": value.ids, f"{field.name}.lengths": value.lengths}
            if value.types is not None:
                found[f"{field.name}.types"] = value.types
    return found


def with_tensors(batch: Any, tensors: dict[str, Tensor]) -> Any:
    """The batch with other tensors in the places that `tensors_of` names."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = tensors[field.name]
        elif isinstance(value, dict):
            changes[field.name] = {key: tensors.get(f"{field.name}.{key}", one) for key, one in value.items()}
        elif isinstance(value, Block):
            changes[field.name] = Block(
                adapter=value.adapter,
                ids=tensors[f"{field.name}.ids"],
                lengths=tensors[f"{field.name}.lengths"],
                types=tensors.get(f"{field.name}.types"),
            )
    return dataclasses.replace(batch, **changes)


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
    step: Callable[[Sequence[Any]], Tensor],
    batches: Sequence[Any],
    *,
    device: torch.device,
    pool: Any,
    kept: object,
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
    try:
        with torch.cuda.graph(graph, pool=pool, stream=_recording_stream(device)):
            losses = step(fixed)
    except RuntimeError:
        torch.cuda.set_stream(stream)  # a recording that breaks off leaves its own stream behind
        _draw_on(device, drawn)
        raise
    return Captured(
        graph=graph,
        inputs=[tensor for tensors in own for tensor in tensors.values()],
        losses=losses,
        kept=kept,
    )


def _draw_on(device: torch.device, drawn: Tensor) -> None:
    """Random numbers go on from `drawn`: a recording that breaks off leaves their source waiting for more."""
    fresh = torch.Generator(device)
    fresh.set_state(drawn)
    number = torch.empty(0, device=device).get_device()
    torch.cuda.default_generators[number].graphsafe_set_state(fresh)


@functools.cache
def _recording_stream(device: torch.device) -> Any:
    """The graph keeps its priority: what runs beside it (`branches`) takes what it leaves of the GPU."""
    return torch.cuda.Stream(device, priority=-1)
