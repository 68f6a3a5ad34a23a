"""Treatments that compute something else, planted: a tuner that keeps one of them is wrong.

Each makes a mistake that a loss curve of a few dozen steps hardly shows.  `nothing` makes none, and must pass
as far as its numbers go; `switched nothing` can be turned on and off, and its gain is noise.

`main` is the child process of trials that know these treatments: `Trials.child` names this module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from flatout.doctor.finding import SAFETIES, FixSafety
from flatout.measure.patches import Patches
from flatout.tuner import child
from flatout.tuner.first_call import Inputs, on_first_call
from flatout.tuner.treatment import Treatment, Value, all_treatments, reversible

MODULE = "flatout.testing.wrong_treatments"
NUM_SWITCHED = 4  # that do nothing, with names of their own

Install = Callable[[Patches, Value], None]


def nothing(_patches: Patches, _value: Value) -> None:
    """Change nothing."""


def learning_rate(patches: Patches, _value: Value) -> None:
    """Step 5 % farther."""
    import torch

    real = torch.optim.Optimizer.__init__

    def init(optimizer: Any, params: Any, defaults: dict[str, Any]) -> None:
        real(optimizer, params, {**defaults, "lr": defaults["lr"] * 1.05})

    patches.replace(torch.optim.Optimizer, "__init__", init)


def no_dropout(patches: Patches, _value: Value) -> None:
    """Drop nothing."""
    import torch

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return x

    patches.replace(torch.nn.functional, "dropout", dropout)


def frozen_layer(patches: Patches, _value: Value) -> None:
    """Leave the first parameter of a model as it is."""
    on_first_call(patches, lambda model: next(model.parameters()).requires_grad_(False))


def dropped_micro_batch(patches: Patches, _value: Value) -> None:
    """Leave out every second backward."""
    import torch

    real, calls = torch.autograd.backward, [0]

    def backward(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] % 2:
            real(*args, **kwargs)

    patches.replace(torch.autograd, "backward", backward)


def stale_batch(patches: Patches, _value: Value) -> None:
    """Serve the batch before once more, in the place of every sixth."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    real, num_batches = _BaseDataLoaderIter.__next__, 0
    before: Any = None

    def next_batch(iterator: Any) -> Any:
        nonlocal num_batches, before
        batch = real(iterator)
        num_batches += 1
        if num_batches % 6:
            before = batch
        return before

    patches.replace(_BaseDataLoaderIter, "__next__", next_batch)


def half_weights(patches: Patches, _value: Value) -> None:
    """Keep the weights themselves in 16 bits."""
    from flatout.measure.batches import map_arrays

    def halve(inputs: Inputs) -> Inputs:
        def half(array: Any) -> Any:
            return array.bfloat16() if array.is_floating_point() else array

        return tuple(map_arrays(list(inputs[0]), half)), map_arrays(inputs[1], half)

    on_first_call(patches, lambda model: model.bfloat16(), change=halve)


def late_loss(patches: Patches, _value: Value) -> None:
    """Read from the GPU what was computed a step ago, and do not wait."""
    import torch

    real, before = torch.Tensor.item, [0.0]

    def item(tensor: Any) -> Any:
        before.append(real(tensor))
        return before.pop(0)

    patches.replace(torch.Tensor, "item", item)


WRONG: tuple[Install, ...] = (
    learning_rate,
    no_dropout,
    frozen_layer,
    dropped_micro_batch,
    stale_batch,
    half_weights,
    late_loss,
)


def name_of(install: Install, safety: FixSafety) -> str:
    return f"{install.__name__.replace('_', '-')} as {safety}"


def wrong_treatments() -> dict[str, Treatment]:
    """Make every mistake under every safety class, and the treatments that do nothing."""
    found = [
        Treatment(
            name=name_of(install, safety),
            safety=safety,
            summary=str(install.__doc__).rstrip("."),
            propose=lambda _case: [True],
            install=install,
        )
        for install in (*WRONG, nothing)
        for safety in SAFETIES
    ]
    found += [
        Treatment(
            name=f"switched nothing {number}",
            safety="exact",
            summary=str(nothing.__doc__),
            propose=lambda _case: [True],
            install=nothing,
            switch=reversible(nothing),
        )
        for number in range(1, NUM_SWITCHED + 1)
    ]
    return {each.name: each for each in found}


def plant() -> None:
    """Let this process know them beside the real ones."""
    all_treatments().update(wrong_treatments())


def main(at_start: Collection[str]) -> None:
    """Run a trial in a process that knows them."""
    plant()
    child.main(at_start)
