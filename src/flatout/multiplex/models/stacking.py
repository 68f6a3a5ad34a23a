"""Modules of a model as `Projection`s, without a second copy of their weights.

Products that read the same input run as one product, so their weights must lie one after the other.  Here the
parameters of q, k and v (or gate and up) move into one storage and become views of its rows; the model
computes what it computed, and its state dict holds the same tensors.  A Conv1D (GPT-2) keeps its weight as
[in, out]; it moves into [out, in] and the parameter becomes the transposed view.  Modules that lie this way
already are left alone, so reading a model twice gives two decoders over the same storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.ground.errors import BadInput
from flatout.multiplex.models.decoder import Projection

if TYPE_CHECKING:
    from torch import Tensor, nn


def stacked(model: nn.Module, names: Sequence[str]) -> Projection:
    """Read the Linear modules `names` as one product; a missing bias is zero where another part has one."""
    modules = [linear_of(model, name) for name in names]
    weights: list[Tensor] = [module.weight for module in modules]
    biases: list[Tensor | None] = [module.bias for module in modules]
    bias = None
    if any(found is not None for found in biases):
        zeros = [weight.new_zeros(weight.shape[0]) for weight in weights]
        bias = _joined([zero if found is None else found for found, zero in zip(biases, zeros, strict=True)])
    parent, _, first = names[0].rpartition(".")
    short = [first, *(name.rpartition(".")[2] for name in names[1:])]
    return Projection(
        name=".".join(filter(None, (parent, "+".join(short)))),
        weight=_joined(weights),
        bias=bias,
        parts=tuple((name, weight.shape[0]) for name, weight in zip(names, weights, strict=True)),
    )


def transposed(model: nn.Module, name: str) -> Projection:
    """Read the Conv1D module `name`, its storage turned to [out, in]."""
    module = model.get_submodule(name)
    weight = _tensor(module, "weight", name)
    if not weight.detach().t().is_contiguous():
        weight.data = weight.data.t().contiguous().t()
    bias = _tensor(module, "bias", name).detach()
    return Projection(name=name, weight=weight.detach().t(), bias=bias, parts=((name, weight.shape[1]),))


def linear_of(model: nn.Module, name: str) -> nn.Linear:
    """Return the module `name`, which must be a plain Linear with a floating-point weight."""
    from torch import nn

    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
        raise BadInput(
            f"{name} is a {type(module).__name__}, not a Linear with floating-point weights",
            hint="load the model without quantisation and merge its adapters first",
        )
    return module


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return one tensor of all rows, and make every part a view of it."""
    import torch

    first = parts[0].detach()
    if len(parts) == 1:
        return first
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    if _adjacent(parts):
        return first.as_strided(shape, first.stride())
    whole = torch.cat([part.detach() for part in parts])
    start = 0
    for part in parts:
        part.data = whole[start : start + part.shape[0]]
        start += part.shape[0]
    return whole


def _adjacent(parts: Sequence[Tensor]) -> bool:
    """Return whether each part begins where the one before it ends, in one storage."""
    storage = parts[0].untyped_storage().data_ptr()
    offset = parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == storage and part.storage_offset() == offset
        if not (same and part.is_contiguous()):
            return False
        offset += part.numel()
    return True


def _tensor(module: nn.Module, name: str, owner: str) -> Tensor:
    from torch import Tensor

    value = getattr(module, name, None)
    if not isinstance(value, Tensor):
        raise BadInput(f"{owner} has no {name}", hint="it is not the module that its family has there")
    return value
