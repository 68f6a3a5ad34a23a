"""Every tensor that a module or a container holds, with its place; and a copy of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TensorPlace = tuple[object, ...]


def held_tensors(
    value: Any, *, at: TensorPlace = (), seen: set[int] | None = None
) -> Iterator[tuple[TensorPlace, Tensor]]:
    """Yield (place, tensor) of a module's parameters, buffers and attributes, and of mappings and lists.

    A tensor that is held at several places comes at each of them; what a tensor itself holds, such as a
    gradient, does not.
    """
    import torch
    from torch import nn

    if isinstance(value, torch.Tensor):
        yield at, value
        return
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Mapping[Any, Any] = {}
    if isinstance(value, nn.Module):
        parts = vars(value)
    elif isinstance(value, Mapping):
        parts = value
    elif isinstance(value, list | tuple):
        parts = dict(enumerate(value))
    for name, part in parts.items():
        key = id(name) if isinstance(name, torch.Tensor) else name  # state is kept by parameter
        yield from held_tensors(part, at=(*at, key), seen=seen)


def fresh_tensor(tensor: Tensor) -> Tensor:
    """Return a copy on the default device of the moment; without values where there are none."""
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensor

    with torch.no_grad():
        fresh = torch.empty_like(tensor, device=torch.get_default_device())
        if not (isinstance(fresh, FakeTensor) or fresh.is_meta or tensor.is_meta):
            fresh.copy_(tensor)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    return fresh
