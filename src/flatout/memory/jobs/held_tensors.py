"""Every tensor that a module or a container holds, with its place; and a copy of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TensorPlace = tuple[object, ...]
SMALL_BYTES = 64 << 10  # a table, a set of class weights: more than that is a weight or an activation


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


def _may_decide(tensor: Tensor) -> bool:
    import torch
    from torch import nn

    if isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    is_small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
    return is_small or not tensor.is_floating_point()


def fresh_tensor(tensor: Tensor) -> Tensor:
    """Return a copy on the current default device; without values if the tensor has none.

    Within a trace, values that may decide what a step does stay known: those of masks, tables and counters.
    """
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensor

    with torch.no_grad():
        device = torch.get_default_device()
        fresh = torch.empty_like(tensor, device=device)
        has_data = not (fresh.is_meta or tensor.is_meta or isinstance(tensor, FakeTensor))
        if has_data and not isinstance(fresh, FakeTensor):
            fresh.copy_(tensor)
        elif has_data and _may_decide(tensor):
            fresh = tensor.to(device, copy=True)  # an operation, which the trace follows with real values
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    return fresh
