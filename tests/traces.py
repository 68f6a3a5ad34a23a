"""Traces made by hand: a small builder, and the step of a model with layers, at any sizes."""

from __future__ import annotations

import numpy as np

from flatout.memory.trace import Component, Phase, Storage, Trace


class TraceBuilder:
    """Births and deaths in the order in which they are written down."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[int] = []
        self.marks: list[tuple[int, str, Phase]] = []
        self.phase: Phase = "setup"

    def mark(self, step: str, phase: Phase) -> None:
        self.phase = phase
        self.marks.append((len(self.events), step, phase))

    def birth(self, num_bytes: int, component: Component, op: str, module: str | None = None) -> int:
        self.storages.append(
            Storage(num_bytes=num_bytes, component=component, phase=self.phase, op=op, module=module)
        )
        self.events.append(len(self.storages) - 1)
        return len(self.storages) - 1

    def death(self, storage: int) -> None:
        self.events.append(~storage)

    def trace(self, **sizes: int) -> Trace:
        return Trace(
            sizes=sizes,
            storages=tuple(self.storages),
            events=np.array(self.events, dtype=np.int64),
            marks=tuple(self.marks),
            num_parameters=sum(s.num_bytes for s in self.storages if s.component == "parameters") // 4,
        )


def layered_step(
    *, batch_size: int = 4, length: int = 128, negatives: int = 2, width: int = 256, num_layers: int = 4
) -> Trace:
    """Two steps of a stack of layers with a contrastive loss: what a trace of a real encoder looks like.

    Rows are batch × (1 + negatives), so the knobs multiply; the similarity is quadratic in the batch, and
    the joined targets are a sum over the knobs.
    """
    build = TraceBuilder()
    rows = batch_size * (1 + negatives)
    weights = [
        build.birth(4 * width * width, "parameters", "parameter", f"layers.{i}") for i in range(num_layers)
    ]
    build.birth(4 * width, "buffers", "buffer")
    build.birth(8 * rows * length, "inputs", "input")
    left_over: list[int] = []
    for step in ("first", "next"):
        build.mark(step, "forward")
        for gradient in left_over:
            build.death(gradient)
        kept = []
        for layer in range(num_layers):
            place = f"layers.{layer}"
            copy = build.birth(2 * width * width, "autocast copies", "aten._to_copy.default", place)
            temporary = build.birth(4 * rows * length * width, "temporaries", "aten.gelu.default", place)
            kept.append(
                [build.birth(2 * rows * length * width, "activations", "aten.mm.default", place), copy]
            )
            build.death(temporary)
        similarity = build.birth(4 * batch_size * batch_size * (1 + negatives), "activations", "aten.bmm")
        targets = build.birth(8 * (batch_size + length + negatives), "activations", "aten.cat.default")
        build.mark(step, "backward")
        build.death(similarity)
        build.death(targets)
        gradients = []
        for layer in reversed(range(num_layers)):
            place = f"layers.{layer}"
            workspace = build.birth(4 * rows * length * 8, "workspaces", "workspace of aten.attention", place)
            gradients.append(build.birth(4 * width * width, "gradients", "gradient", place))
            build.death(workspace)
            for storage in kept[layer]:
                build.death(storage)
        build.mark(step, "optimizer")
        if step == "first":
            for layer in range(2 * num_layers):
                build.birth(4 * width * width, "optimizer state", "optimizer state", f"layers.{layer // 2}")
        update = [build.birth(4 * width * width, "temporaries", "aten._foreach_sqrt") for _ in weights]
        for storage in update:
            build.death(storage)
        left_over = gradients
    return build.trace(batch_size=batch_size, length=length, negatives=negatives)
