"""Use larger micro-batches, and fewer of them in a step: the samples of each step stay the same.

A script that accumulates gradients splits a step's samples into micro-batches, often smaller than memory
requires.  A GPU, or Python, then waits between them.  If one number sets the batch size and another how many
batches make a step, both change together: in what argparse returns, in the Trainer's arguments, or in an
Accelerator and the loaders made after it.  Their product stays the same.

Batch normalisation, or a loss that is not a mean, then computes something else, and the gradients show it.
Memory grows at most as the batch does, so the peak that was measured says which size certainly fits.  Larger
ones may: weights, gradients and the optimizer's state do not grow.  The trial shows it.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, NamedTuple

from flatout.measure.evidence import Evidence
from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value

BATCH = re.compile(r"batch_?size$|^bs$|^b$", re.IGNORECASE)
ACCUMULATION = re.compile(r"accum", re.IGNORECASE)
EVALUATES = re.compile(r"eval|valid|test", re.IGNORECASE)
MOST_VALUES = 3
USABLE = 0.85  # of the GPU's memory


class _Cut(NamedTuple):
    """How samples are split into a step's batches, before and after."""

    size: int
    number: int
    new_size: int
    new_number: int

    def __str__(self) -> str:
        return f"{self.size}x{self.number}={self.new_size}x{self.new_number}"


def propose(case: Case) -> list[Value]:
    """Propose sizes, largest first, if every step accumulates the same number of batches of one loader.

    The largest that certainly fits is among them.
    """
    evidence = case.evidence
    steps = evidence.kept("real")
    numbers = {step.num_backwards for step in steps}
    sizes = {loader.batch_size for loader in evidence.loaders if loader.trains}
    if len(numbers) != 1 or len(sizes) != 1 or "accum" not in case.source.lower():
        return []
    number, size = numbers.pop(), sizes.pop()
    if size is None or max(step.num_batches for step in steps) != number:  # one batch may be prefetched
        return []
    factors = [factor for factor in range(number, 1, -1) if number % factor == 0]
    fits = [factor for factor in factors if factor <= _certain_factor(evidence)]
    chosen = factors[:MOST_VALUES]
    if fits and fits[0] not in chosen:
        chosen[1:] = [factors[factors.index(fits[0]) // 2], fits[0]]  # one between, and the certain one
    return [str(_Cut(size, number, size * each, number // each)) for each in chosen]


def _certain_factor(evidence: Evidence) -> float:
    """Return how many times the batch fits into the GPU even if everything at the peak grows with it."""
    peak = evidence.memory.peak_bytes if evidence.memory is not None else None
    total = evidence.gpu.memory_bytes if evidence.gpu is not None else None
    return USABLE * total / peak if peak and total else math.inf


def install(patches: Patches, value: Value) -> None:
    from flatout.ground.script.main import after_import

    cut = _Cut(*map(int, re.split("[x=]", str(value))))
    _change_arguments(cut, patches)
    for name, change in (
        ("transformers.training_args", _change_trainer),
        ("accelerate.accelerator", _change_accelerator),
    ):
        patches.on_undo(after_import(name, functools.partial(change, cut=cut, patches=patches)))


def _change_arguments(cut: _Cut, patches: Patches) -> None:
    import argparse

    @patches.around(argparse.ArgumentParser, "parse_known_args")
    def parse(real: Any, *args: Any, **kwargs: Any) -> Any:
        found, rest = real(*args, **kwargs)
        given = {name: each for name, each in vars(found).items() if not EVALUATES.search(name)}
        sizes = [name for name, each in given.items() if BATCH.search(name) and each == cut.size]
        numbers = [name for name, each in given.items() if ACCUMULATION.search(name) and each == cut.number]
        if len(sizes) == len(numbers) == 1:  # otherwise it is unclear which one is meant
            setattr(found, sizes[0], cut.new_size)
            setattr(found, numbers[0], cut.new_number)
        return found, rest


def _change_trainer(module: Any, *, cut: _Cut, patches: Patches) -> None:
    @patches.around(module.TrainingArguments, "__init__")
    def init(real: Any, arguments: Any, *args: Any, **kwargs: Any) -> None:
        size = kwargs.get("per_device_train_batch_size", module.TrainingArguments.per_device_train_batch_size)
        if (size, kwargs.get("gradient_accumulation_steps")) == (cut.size, cut.number):
            kwargs["per_device_train_batch_size"] = cut.new_size
            kwargs["gradient_accumulation_steps"] = cut.new_number
        real(arguments, *args, **kwargs)


def _change_accelerator(module: Any, *, cut: _Cut, patches: Patches) -> None:
    from torch.utils.data import DataLoader

    is_changed = False

    @patches.around(module.Accelerator, "__init__")
    def init(real: Any, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal is_changed
        if kwargs.get("gradient_accumulation_steps") == cut.number:
            kwargs["gradient_accumulation_steps"] = cut.new_number
            is_changed = True
        real(accelerator, *args, **kwargs)

    @patches.around(DataLoader, "__init__")
    def load(real: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        if is_changed and kwargs.get("batch_size") == cut.size:
            kwargs["batch_size"] = cut.new_size
        real(loader, *args, **kwargs)


TREATMENT = Treatment(
    propose,
    install,
    "larger micro-batches and fewer of them, the same samples in each step",
    safety="reordered",
    changes_batches=True,
    regroups=True,
    moves_reads=True,
)
