"""Trace what depends on the results of a call, and make stand-ins for those results.

Calls of a loop can become one call only if no input depends on an earlier result.  A torch-function mode
traces the results through one step: everything computed from a traced tensor is traced too, and a value read
back to the host may influence anything.

Stand-ins were computed from remembered inputs.  `attached` ties them to the inputs of this step, which get
gradients of zero, so the backward pass before the loop runs as usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

READS = frozenset(
    ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
)


class FollowedResults(TorchFunctionMode):
    """Traces the tensors of one step that depend on the results of watched modules."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, tuple[torch.Tensor, frozenset[int]]] = {}  # by identity, kept alive
        self._read: set[int] = set()

    def follow(self, result: Any, source: int) -> None:
        self._mark(result, frozenset((source,)))

    def depends(self, value: Any, source: int) -> bool:
        """Return whether `value` may have been computed from a result of `source`."""
        return source in self._read or source in self._sources_of(value)

    def is_from(self, value: Any, source: int) -> bool:
        """Return whether torch computed `value` from a result of `source`."""
        return source in self._sources_of(value)

    def forget(self) -> None:
        self._sources.clear()
        self._read.clear()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._sources:
            sources = self._sources_of((args, kwargs))
            if sources:
                name = getattr(function, "__name__", "")
                if name in READS:
                    self._read |= sources
                self._mark(result, sources)
                if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
                    self._mark(args[:1], sources)
        return result

    def _mark(self, value: Any, sources: frozenset[int]) -> None:
        for tensor in tensors_in(value):
            known = self._sources.get(id(tensor))
            self._sources[id(tensor)] = (tensor, sources if known is None else known[1] | sources)

    def _sources_of(self, value: Any) -> frozenset[int]:
        known = (self._sources.get(id(tensor)) for tensor in tensors_in(value))
        return frozenset().union(*(each[1] for each in known if each is not None))


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors in a call's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth - 1)


def attached(kept: torch.Tensor, inputs: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return `kept` as if it had been computed from the inputs that have gradients."""
    differentiable = [each for each in inputs if each.requires_grad] if torch.is_grad_enabled() else []
    if not differentiable:
        return kept
    result: torch.Tensor = _Attached.apply(kept, *differentiable)  # type: ignore[no-untyped-call]
    return result


class FirstRow:
    """The first row of a result; its gradient becomes the gradient of every row."""

    def __init__(self) -> None:
        self.has_gradient = False

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        row: torch.Tensor = _TakeFirst.apply(whole, self)  # type: ignore[no-untyped-call]
        return row


class _TakeFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, first: FirstRow) -> torch.Tensor:
        ctx.shape, ctx.first = whole.shape, first
        return whole[:1].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.first.has_gradient = True
        return gradient.expand(ctx.shape).contiguous(), None


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.inputs = inputs  # not saved: the script may change them in place
        return kept.detach()  # unlike a view, it may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        zeros = (torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in ctx.inputs)
        # with create_graph=True gradients have gradients too: attached() is off without it
        return (None, *(attached(zero, [each]) for zero, each in zip(zeros, ctx.inputs, strict=True)))
