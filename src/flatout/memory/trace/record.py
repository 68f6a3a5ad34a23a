"""A trace of a training step: the births and deaths of every storage, in order.

A storage is one block that PyTorch asks its allocator for.  Events are numbers: `i` is the birth of storage
`i`, `~i` (that is -1-i) its death.  A trace holds what is alive when training starts (setup, in order of
birth), the first step, and a second one in which gradients of the first are dropped and the optimizer's
state is there already: the peak of a long run lies in one of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flatout.memory.cuda.formulas import Formula
from flatout.memory.jobs.job import StepPhase

Component = Literal[
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "autocast copies",
    "temporaries",
    "inputs",
    "buffers",
    "workspaces",
]
COMPONENTS: tuple[Component, ...] = (
    "parameters",
    "buffers",
    "optimizer state",
    "gradients",
    "inputs",
    "autocast copies",
    "activations",
    "temporaries",
    "workspaces",
)
# What a trace takes from a table or an assumption, because neither shapes nor PyTorch's source tell it.
Lean = Literal[
    "convolutions", "recurrent layers", "narrow recurrent layers", "dropout of recurrent layers", "eager"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """One block of memory: how large, what for, when it was born and by which operation."""

    num_bytes: int
    component: Component
    phase: StepPhase
    op: str  # "aten.mm", or "parameter", "gradient", ... for what has a name of its own
    module: str | None = None  # dotted name of the innermost module whose forward made it
    formula: Formula | None = None  # set if the size grows in steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """A value or size that depends on data the trace does not have, and the answer that was assumed."""

    op: str
    module: str | None
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """Births and deaths of one job at one set of sizes."""

    sizes: dict[str, int]
    storages: tuple[Storage, ...]
    events: NDArray[np.int64]  # i: storage i is born; ~i: it dies
    marks: tuple[tuple[int, str, StepPhase], ...]  # (index of the first event, "first" or "next" step, phase)
    num_parameters: int = 0
    num_trainable: int = 0
    guesses: tuple[Guess, ...] = ()
    attention: dict[str, int] = field(default_factory=dict)  # attention kernels and how often each ran
    leans_on: tuple[Lean, ...] = ()
    native: bool = False  # made on tensors of CUDA, where PyTorch chose the kernels
    seconds: float = 0.0
