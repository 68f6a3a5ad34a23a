"""Small jobs and how to trace them without changing the tests' own process; and traces made by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.hardware.device import Device
from flatout.memory.cuda import rules
from flatout.memory.cuda.workspaces import Workspaces
from flatout.memory.jobs.job import Job, Recipe, StepPhase
from flatout.memory.process.isolated_process import check_backward, run_isolated
from flatout.memory.trace.make_trace import import_before_forking, trace_here
from flatout.memory.trace.record import Component, Storage, Trace
from flatout.memory.trace.tracer import Tracer
from flatout.memory.trace.two_steps import Born

# Small jobs for tests of the trace, and how to trace them without changing the process of the tests


def _load_what_a_step_loads() -> None:
    """PyTorch imports much with the first optimizer: once here instead of in every child.

    Not so a backward, where PyTorch has CUDA: children forked after that could run none.
    """
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    torch.optim.AdamW([parameter]).step()
    with FakeTensorMode():
        loss = nn.Linear(2, 2)(torch.ones(2, 2)).sum()
        if torch.version.cuda is None:
            loss.backward()
    import_before_forking()


_load_what_a_step_loads()


class Made(NamedTuple):
    """What a function made under the rules of CUDA."""

    result: Any
    storages: list[Born]
    guesses: list[str]
    attention: dict[str, int]

    def sizes_of(self, op: str) -> list[int]:
        return [storage.num_bytes for storage in self.storages if op in storage.op]


def under_rules(
    function: Callable[..., Any], *args: Any, compute_capability: tuple[int, int] = (9, 0)
) -> Made:
    """`function(*args)` on tensors without data, with the rules of CUDA, in a child process."""
    return run_isolated(_under_rules, function, args, compute_capability, what="a test")


def _under_rules(function: Callable[..., Any], args: Any, compute_capability: tuple[int, int]) -> Made:
    check_backward()
    rules.install(compute_capability=compute_capability)
    tracer = Tracer(device="cpu", workspaces=Workspaces(compute_capability=compute_capability))
    with FakeTensorMode(allow_non_fake_inputs=True), tracer:
        result = function(*args)
    guesses = [guess.answer for guess in tracer.guesses]
    return Made(result, tracer.born, guesses, dict(tracer.attention))


def traced(job: Job, recipe: Recipe | None = None, *, device: Device | None = None, **sizes: int) -> Trace:
    """The trace of `job`, taken in a child process."""
    wanted = {**job.sizes, **sizes}
    work = partial(trace_here, job, recipe or Recipe(), wanted, device=device)
    return run_isolated(work, what="a test")


def job_of(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[..., Any],
    *,
    loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(batch).sum(),
    **more: Any,
) -> Job:
    return Job(name="job", make_model=make_model, make_batch=make_batch, loss=loss, **more)


def tower() -> Job:
    def make_batch(*, batch_size: int, width: int) -> Any:
        return torch.zeros(batch_size, width, 256)

    return Job(
        name="tower",
        make_model=lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)),
        make_batch=make_batch,
        loss=lambda model, batch: model(batch).square().mean(),
        sizes={"batch_size": 8, "width": 32},
    )


def mlp_job(*, width: int = 32, **more: Any) -> Job:
    """Two layers with biases: 2 x (width² + width) parameters."""
    return job_of(
        lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)),
        lambda batch_size: torch.randn(batch_size, width),
        **more,
    )


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch_size, length, width = x_BTD.shape
        heads = self.project(self.norm(x_BTD)).view(batch_size, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch_size, length, width))
        result: Tensor = x_BTD + self.feed(x_BTD)
        return result


class LanguageModel(nn.Module):
    """A transformer whose embedding is also its last layer; it can checkpoint its blocks."""

    def __init__(self, *, num_tokens: int = 100, width: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(num_layers))
        self.head = nn.Linear(width, num_tokens, bias=False)
        self.head.weight = self.embedding.weight
        self.is_checkpointed = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        assert gradient_checkpointing_kwargs == {"use_reentrant": False}
        self.is_checkpointed = True

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            if self.is_checkpointed:
                x_BTD = torch.utils.checkpoint.checkpoint(block, x_BTD, use_reentrant=False)
            else:
                x_BTD = block(x_BTD)
        result: Tensor = self.head(x_BTD)
        return result


def language_model_job(*, length: int = 64, **more: Any) -> Job:
    def loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten())

    return job_of(
        LanguageModel,
        lambda batch_size, length: torch.randint(0, 100, (batch_size, length)),
        loss=loss,
        sizes={"batch_size": 4, "length": length},
        **more,
    )


def alive_at_end_of_first_step(trace: Trace) -> list[Storage]:
    """What is alive when the next step begins, its gradients not yet dropped."""
    end = next(at for at, step, _phase in trace.marks if step == "next")
    alive: dict[int, None] = {}
    for event in trace.events[:end].tolist():
        if event >= 0:
            alive[event] = None
        else:
            del alive[~event]
    return [trace.storages[number] for number in alive]


def bytes_by_component(storages: list[Storage]) -> dict[str, int]:
    total: defaultdict[str, int] = defaultdict(int)
    for storage in storages:
        total[storage.component] += storage.num_bytes
    return dict(total)


# Traces made by hand: a small builder, and the step of a model with layers, at any sizes


class TraceBuilder:
    """Births and deaths in the order in which they are written down."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[int] = []
        self.marks: list[tuple[int, str, StepPhase]] = []
        self.phase: StepPhase = "setup"

    def mark(self, step: str, phase: StepPhase) -> None:
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
