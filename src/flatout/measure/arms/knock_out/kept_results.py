"""Keep what a block computed in one step, and return it in place of the block in later steps.

A returned tensor is tied to the tensors that the block would have read: gradients of zero flow to them, and
none into the block.  An input that the block fills in place (`batch[i] = row`) is filled with the same
values, as the memory of a new tensor holds anything.  Each call in a step has its own results, and so do
calls with inputs of other shapes or without gradients, as in an evaluation: if none are known, the block runs
and the step does not count.  A lookup takes some microseconds, and a step may need a thousand of them, so
lookups are not timed.

Shapes say nothing about a list of graphs.  Results of such inputs are kept in two steps, and serve only if
they have the same shapes in both.  Steps on one and the same batch need only one.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.measure.arms.call_results import attached, tensors_in
from flatout.measure.arms.knock_out.blocks import Block
from flatout.measure.batches import bytes_of, version_of
from flatout.measure.clock import ident, now
from flatout.measure.lines.module_calls import is_transformed

MOST_CALLS = 5000  # in a step
MOST_KEPT = 20_000
DEEPEST = 4
MOST_DIRECT = 8  # items of a list whose shapes are read
PLAIN = (int, float, complex, bool, str, bytes, type(None), slice, range)
UNBOUND = object()

Shapes = tuple[Any, ...]
Key = tuple[int, bool, bool, Shapes]  # number of the call, gradients, inference mode, shapes


class NotPlain(Exception):
    """Says which result cannot be kept."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor of a kept result."""

    tensor: Any
    requires_grad: bool
    input: int | None  # the index of the input that it is identical to


@dataclass(slots=True)
class _Kept:
    bound: tuple[Any, ...]
    returned: Any = None
    filled: tuple[tuple[int, Any], ...] = ()  # inputs that the block changed in place, by number


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A call of the block that runs."""

    key: Key
    values: list[Any]  # of the inputs
    versions: list[int]  # of the tensors in them


class KeptResults:
    """Answers the switch around one block; on threads other than the training thread the block runs."""

    def __init__(
        self,
        block: Block,
        *,
        owner: Callable[[], int],
        function: str | None = None,
        number: int | None = None,
        on_begin: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        on_fall_back: Callable[[], None] = lambda: None,
        book_out: Callable[[float], None] = lambda spent_s: None,
    ) -> None:
        self.results = [_mangled(name, function) for name in block.results]
        self.inputs = [_mangled(name, function) for name in block.inputs]
        self.number = number  # of the switch that it answers
        self._owner, self._on_begin, self._on_end = owner, on_begin, on_end
        self._on_fall_back, self._book_out = on_fall_back, book_out
        self.is_on = True  # False once the steps without the block are over
        self.on_one_batch = False  # every step has the same inputs
        self.giving = False
        self.failure: str | None = None
        self.num_bytes = 0  # of the inputs and results of one step
        self.requires_grad = False
        self.num_steps = 0  # in which results were kept
        self._is_opaque = False  # an input may change in ways that its shapes do not show
        self._kept: dict[Key, _Kept] = {}
        self.reset()

    def reset(self) -> None:
        """Reset the counters after a step."""
        self.num_calls = 0
        self.num_unknown = 0  # of these calls, the ones without a kept result
        self._under_way: list[_UnderWay | None] = []
        self._given: tuple[_Kept, list[Any]] | None = None

    def forget(self) -> None:
        self._kept.clear()

    @property
    def are_known(self) -> bool:
        """Return whether results were kept, in two steps if shapes do not tell different inputs apart."""
        return bool(self._kept) and self.num_steps >= 1 + (self._is_opaque and not self.on_one_batch)

    def __eq__(self, other: object) -> bool:
        """Compare equal to the number of its switch."""
        return self is other or self.number == other

    __hash__ = None  # type: ignore[assignment]

    # -- called by the rewritten function

    def is_free(self) -> bool:
        """Return whether the block's results are known, so that it need not run."""
        if not self.is_on or ident() != self._owner() or self.failure is not None:
            return False
        if self._under_way:  # the block calls its own function
            self._under_way.append(None)
            return False
        if is_transformed():
            self.failure = "it runs inside a transform of torch.func"
            return False
        start_s = now()
        variables = sys._getframe(1).f_locals
        values = [variables.get(name) for name in self.inputs]
        key = (self.num_calls, *_modes(), _shapes(values))
        self.num_calls += 1
        known = self._kept.get(key) if self.giving else None
        if known is not None:
            self._given = (known, values)
            self._book_out(now() - start_s)
            return True
        self._on_fall_back()
        self.num_unknown += self.giving
        if self.num_calls > MOST_CALLS or len(self._kept) > MOST_KEPT:
            self.failure = f"it runs more than {MOST_CALLS} times in a step"
            return False
        self._is_opaque |= any(map(is_opaque, values))
        versions = [version_of(tensor) for tensor in tensors_in(values)]
        self._under_way.append(_UnderWay(key, values, versions))
        self._on_begin()
        return False

    def note(self) -> None:
        """Keep what the block bound; called after it ran."""
        self._note(sys._getframe(1).f_locals, None)

    def note_returned(self, value: Any) -> Any:
        self._note(sys._getframe(1).f_locals, value)
        return value

    def give(self) -> tuple[Any, ...]:
        """Return what the block would have bound."""
        assert self._given is not None
        start_s = now()
        known, values = self._given
        _fill(known, values)
        bound = tuple(_give(held, values) for held in known.bound)
        self._book_out(now() - start_s)
        return bound

    def give_returned(self) -> Any:
        assert self._given is not None
        start_s = now()
        known, values = self._given
        returned = _give(known.returned, values)
        self._book_out(now() - start_s)
        return returned

    def _note(self, variables: Mapping[str, Any], returned: Any) -> None:
        if ident() != self._owner() or not self._under_way:
            return
        entry = self._under_way.pop()
        if entry is None:
            return
        self._on_end()
        key, inputs = entry.key, list(tensors_in(entry.values))
        try:
            bound = [_value(variables, name) for name in self.results]
            kept = _Kept(
                tuple(_hold(value, inputs, name) for value, name in zip(bound, self.results, strict=True)),
                _hold(returned, inputs, "what it returns"),
                _filled(inputs, entry.versions),
            )
        except NotPlain as error:
            self.failure = str(error)
            return
        before = self._kept.get(key)
        if before is not None and _held_shapes(before) != _held_shapes(kept):
            self.failure = "its results change their shapes from step to step"
        self._kept[key] = kept
        if before is None:
            self._measure(inputs, [*tensors_in(bound), *tensors_in(returned)])

    def _measure(self, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        if not self.giving:
            unique = {id(tensor): tensor for tensor in (*inputs, *results)}
            self.num_bytes += sum(map(bytes_of, unique.values()))
            self.requires_grad |= any(tensor.requires_grad for tensor in results)


def _mangled(name: str, function: str | None) -> str:
    """Return a name as a method of a class stores it: `self.__state` is `self._Model__state`."""
    class_name = (function or "").rpartition(".")[0].rpartition(".")[2].lstrip("_")
    return ".".join(
        f"_{class_name}{part}" if class_name and part.startswith("__") and not part.endswith("__") else part
        for part in name.split(".")
    )


def _value(variables: Mapping[str, Any], name: str) -> Any:
    first, _, attribute = name.partition(".")
    value = variables.get(first, UNBOUND)
    return getattr(value, attribute, UNBOUND) if attribute else value


def _modes() -> tuple[bool, bool]:
    """Return whether gradients are recorded, and whether tensors are made that never have any."""
    import torch

    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _shapes(values: Sequence[Any]) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in _direct(values))


def _direct(values: Sequence[Any]) -> Iterator[Any]:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)) and len(value) < MOST_DIRECT:
            yield from (item for item in value if isinstance(item, torch.Tensor))


def _filled(inputs: Sequence[Any], versions: Sequence[int]) -> tuple[tuple[int, Any], ...]:
    """Return the tensors that changed in place since `versions` were read, without gradients."""
    return tuple(
        (number, tensor.detach())
        for number, (tensor, version) in enumerate(zip(inputs, versions, strict=False))
        if version_of(tensor) != version and _can_be_filled(tensor)
    )


def _fill(known: _Kept, values: Sequence[Any]) -> None:
    """Write into each input what the block wrote there."""
    inputs = list(tensors_in(values)) if known.filled else []
    for number, content in known.filled:
        given = inputs[number] if number < len(inputs) else None
        if given is None or given.shape != content.shape or not _can_be_filled(given):
            continue
        if given.data_ptr() != content.data_ptr():
            given.copy_(content)


def _can_be_filled(tensor: Any) -> bool:
    import torch

    return type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.requires_grad


def is_opaque(value: Any) -> bool:
    """Return whether a value holds objects whose sizes are unknown: a list of graphs, of sentences."""
    import torch

    if isinstance(value, dict):
        return any(map(is_opaque, value.values()))
    if not isinstance(value, (list, tuple)) or isinstance(value, torch.Size):
        return False
    known = (*PLAIN, torch.Tensor, torch.nn.Module)
    return len(value) >= MOST_DIRECT or not all(isinstance(item, known) for item in value)


def _held_shapes(kept: _Kept) -> list[Any]:
    def shapes(held: Any) -> Iterator[Any]:
        if isinstance(held, _Held):
            yield tuple(held.tensor.shape)
        elif isinstance(held, (_Sequence, _Mapping)):
            items = held.items.values() if isinstance(held, _Mapping) else held.items
            yield from (shape for item in items for shape in shapes(item))

    return [shape for held in (*kept.bound, kept.returned) for shape in shapes(held)]


def _hold(value: Any, inputs: Sequence[Any], name: str, depth: int = DEEPEST) -> Any:
    """Copy a value with its tensors detached; raise NotPlain if that is impossible."""
    import torch

    if isinstance(value, torch.Tensor):
        which = next((number for number, tensor in enumerate(inputs) if tensor is value), None)
        if isinstance(value, torch.nn.Parameter):
            return value
        return _Held(value.detach(), value.requires_grad, which)
    if value is UNBOUND or isinstance(value, (*PLAIN, torch.dtype, torch.device, torch.Size)):
        return None if value is UNBOUND else value
    if type(value).__module__ == "numpy":
        return value
    if depth and (isinstance(value, dict) or dataclasses.is_dataclass(value)):
        items = value if isinstance(value, dict) else vars(value)
        return _Mapping(
            type(value), {key: _hold(item, inputs, name, depth - 1) for key, item in items.items()}
        )
    if depth and isinstance(value, (list, tuple)):
        return _Sequence(type(value), [_hold(item, inputs, name, depth - 1) for item in value])
    raise NotPlain(f"its result {name} is a {type(value).__name__}, not a tensor or a plain value")


@dataclass(frozen=True, slots=True)
class _Sequence:
    kind: Any
    items: list[Any]


@dataclass(frozen=True, slots=True)
class _Mapping:
    kind: Any
    items: dict[Any, Any]


def _give(held: Any, values: Sequence[Any]) -> Any:
    if isinstance(held, _Held):
        return _tensor(held, values)
    if isinstance(held, _Sequence):
        items = [_give(item, values) for item in held.items]
        return held.kind(*items) if hasattr(held.kind, "_fields") else held.kind(items)
    if isinstance(held, _Mapping):
        mapping = {key: _give(item, values) for key, item in held.items.items()}
        return held.kind(mapping) if held.kind in (dict, OrderedDict) else held.kind(**mapping)
    return held


def _tensor(held: _Held, values: Sequence[Any]) -> Any:
    import torch

    inputs = list(tensors_in(values))
    if held.input is not None and held.input < len(inputs):
        given = inputs[held.input]
        if given.requires_grad or not held.requires_grad:  # else the block wrote into it what has gradients
            return given
    if not held.requires_grad or not torch.is_grad_enabled():
        return held.tensor.detach()
    tied = attached(held.tensor, inputs)
    if tied.requires_grad:
        return tied
    source = torch.zeros((), requires_grad=True)  # a leaf of its own could not be changed in place
    return attached(held.tensor, [source])
