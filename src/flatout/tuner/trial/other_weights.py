"""Weights that no optimizer changes: averages, target networks, frozen parts.

No loss and no gradient shows an average that is wrong.  So trials are compared by the norm of each such
weight at their end, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from gc import collect, get_objects, unfreeze  # by name: a treatment replaces gc.collect
from typing import Any
from weakref import WeakSet


def all_modules() -> WeakSet[Any]:
    """Return the modules of this process."""
    from torch import nn

    unfreeze()  # frozen objects are not listed
    collect()  # modules that nobody uses live on by chance
    return WeakSet(each for each in get_objects() if issubclass(type(each), nn.Module))


def find_weights(*, before: Collection[Any], own: Collection[int]) -> list[Any]:
    """Return the parameters of modules made since `before`, except those whose id is the optimizers' own."""
    made = [each for each in all_modules() if each not in before]
    found = {id(each): each for module in made for each in _parameters_of(module)}
    return [each for key, each in found.items() if key not in own]


def norms_of(weights: Sequence[Any]) -> tuple[float, ...]:
    """Return the norms in 64 bits, sorted, as modules have no order."""
    if not weights:
        return ()  # torch may not have been imported, or not to its end
    import torch

    dense = [each.detach() for each in weights if each.is_floating_point() and each.layout == torch.strided]
    return tuple(sorted(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in dense))


def _parameters_of(module: Any) -> list[Any]:
    """Return a module's own parameters; a module that is being made has none yet."""
    return [each for each in vars(module).get("_parameters", {}).values() if each is not None]
