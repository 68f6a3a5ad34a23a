"""Weights that no optimizer changes: averages, target networks, frozen parts.

No loss and no gradient shows an average that is wrong.  So trials are compared by the norm of each such
weight at their end, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from gc import collect, get_freeze_count, unfreeze  # by name: a treatment replaces gc.collect
from typing import Any
from weakref import WeakSet

from flatout.measure.lines.live_objects import live_objects, with_subclasses


def all_modules() -> WeakSet[Any]:
    """Return the modules of this process that are not frozen."""
    from torch import nn

    collect(0)  # the youngest objects are not listed
    return WeakSet(live_objects(with_subclasses(nn.Module)))


def find_weights(*, before: Collection[Any], own: Collection[int], num_frozen: int = 0) -> list[Any]:
    """Return the parameters of modules made since `before`, except those whose id is the optimizers' own.

    `num_frozen` objects were frozen before; if a treatment froze more, all are listed again.
    """
    if get_freeze_count() > num_frozen:
        unfreeze()
    found = _weights_of(all_modules(), before=before, own=own)
    if found:
        collect()  # modules that nobody uses live on by chance
        found = _weights_of(all_modules(), before=before, own=own)
    return list(found.values())


def _weights_of(modules: Collection[Any], *, before: Collection[Any], own: Collection[int]) -> dict[int, Any]:
    made = [each for each in modules if each not in before]
    found = {id(each): each for module in made for each in _parameters_of(module)}
    return {key: each for key, each in found.items() if key not in own}


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
