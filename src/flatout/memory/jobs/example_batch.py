"""Batches of any size from one example.

The batch dimension is dimension 0 of every tensor whose leading size is the batch size; rows are repeated
or cut, so values stay real (token ids inside the vocabulary, labels inside the classes).  Tensors with
another leading size, scalars and everything that is not a tensor stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_BATCH_SIZE = 8


def refuse_nested() -> NoReturn:
    raise BadInput(
        "the step uses nested (ragged) tensors, whose memory cannot be predicted",
        hint="plan it with rows padded to the longest (torch.nested.to_padded_tensor), an upper bound",
    )


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor of a batch: in mappings, sequences and dataclasses, however deep."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_nested:
            refuse_nested()
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    yield from found


def leading_size(batch: Any) -> int:
    """Return the batch size of an example: the leading size of most of its tensors."""
    sizes = Counter(int(tensor.shape[0]) for tensor in tensors_of(batch) if tensor.dim() > 0)
    if not sizes:
        raise BadInput(
            f"the example batch ({type(batch).__name__}) holds no tensor with a batch dimension",
            hint="give a tensor, or a dict, list or tuple of tensors whose dimension 0 is the batch",
        )
    return max(sizes, key=lambda size: sizes[size])


def resize_batch(batch: Any, *, batch_size: int, example_size: int) -> Any:
    """Return the example with `batch_size` rows instead of `example_size`."""
    import torch

    def with_rows(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != example_size:
            return tensor
        if tensor.layout is not torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise BadInput(
                f"the example batch holds a {layout} tensor, whose rows cannot be repeated",
                hint="plan the step with dense tensors, an upper bound",
            )
        return tensor[torch.arange(batch_size) % example_size]

    return map_tensors(batch, with_rows)


def maker_of(batch: Any, *, batch_size: int | None = None) -> tuple[Callable[..., Any], dict[str, int]]:
    """Return `make_batch(**sizes)` and its sizes, from a batch maker or an example batch.

    The sizes of a batch maker are its parameters with their defaults; `batch_size` needs none.  One with a
    single parameter of another name gets the batch size there.
    """
    if callable(batch):
        return _adapt_maker(batch)
    size = batch_size or leading_size(batch)
    if not any(tensor.dim() and tensor.shape[0] == size for tensor in tensors_of(batch)):
        raise BadInput(
            f"no tensor of the example batch has the leading size batch_size={size}",
            hint="give the number of its rows as batch_size",
        )

    def make_batch(*, batch_size: int) -> Any:
        return resize_batch(batch, batch_size=batch_size, example_size=size)

    return make_batch, {"batch_size": size}


def _default_batch_size(parameter: inspect.Parameter) -> int:
    default = parameter.default
    if default is inspect.Parameter.empty or default is None:
        return DEFAULT_BATCH_SIZE
    if not isinstance(default, int):
        raise BadInput(f"the batch maker's batch_size is {default!r} by default, which is not a whole number")
    return default


def _adapt_maker(maker: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, int]]:
    parameters = list(inspect.signature(maker).parameters.values())
    named = [
        p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "batch_size"
    ]
    if len(parameters) == 1 and named and (named[0].default is inspect.Parameter.empty):

        def make_batch(*, batch_size: int) -> Any:
            return maker(batch_size)

        return make_batch, {"batch_size": DEFAULT_BATCH_SIZE}
    sizes = {}
    for parameter in parameters:
        if parameter.name == "batch_size":
            sizes["batch_size"] = _default_batch_size(parameter)
        elif isinstance(parameter.default, int) and not isinstance(parameter.default, bool):
            sizes[parameter.name] = parameter.default
    if "batch_size" not in sizes and any(p.kind is p.VAR_KEYWORD for p in parameters):
        sizes["batch_size"] = DEFAULT_BATCH_SIZE
    if "batch_size" not in sizes:
        raise BadInput(
            f"the batch maker takes ({', '.join(p.name for p in parameters)}), but no batch_size",
            hint="def make_batch(*, batch_size, length=512): ...",
        )
    unknown = [p.name for p in named if p.default is inspect.Parameter.empty]
    if unknown:
        raise BadInput(
            f"the batch maker's {', '.join(unknown)} have no default, so their size is not known",
            hint="give them one, or return a Job with its sizes",
        )
    return maker, sizes


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply `function` to every tensor of a structure; a mapping that cannot be changed comes back as a dict.

    Structures are mappings, sequences, dataclasses, objects with tensors as attributes, and what torch's
    pytree knows besides.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return _with_items(value, {name: map_tensors(item, function) for name, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    if attributes := _attributes(value):
        twin = copy.copy(value)
        for name, item in attributes.items():
            object.__setattr__(twin, name, map_tensors(item, function))  # a dataclass may be frozen
        return twin
    return tree_map_only(torch.Tensor, function, value)


def _with_items(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same class, such as a BatchEncoding, with other items."""
    if type(value) is dict or not isinstance(value, MutableMapping):
        return items
    twin: MutableMapping[Any, Any] = copy.copy(value)
    twin.update(items)
    return twin


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass, or of an object that holds a tensor; none for a module."""
    import torch

    if isinstance(value, type | torch.nn.Module):
        return {}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    held: dict[str, Any] = getattr(value, "__dict__", {})
    return dict(held) if any(isinstance(item, torch.Tensor) for item in held.values()) else {}
