"""Who keeps a tensor alive, and how much of an autograd graph does it hold?

A tensor lives as long as something refers to it.  Starting from the tensor, this follows referrers up through
lists, dicts and tuples until one of them has a name: a local variable of a running function, a global, an
attribute, a variable that a closure has captured.  Tensors that only a graph has saved have no Python
referrer at all: they are victims, and their holder is the holder of the graph.

A graph is reached from a tensor's `grad_fn`.  Its nodes carry the order in which they were made, so "made
before this step began, yet still reachable" is a comparison of two numbers.

Referrers of a tensor may be tuples that another thread still fills, so the walk runs `alone`.  Sources are
read first, because reading a file lets other threads run.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from flatout.measure.evidence import Place
from flatout.measure.lines.live_objects import alone, live_objects
from flatout.measure.lines.storing_lines import StoringLine, find_storing_line, storing_lines
from flatout.measure.user_code import UserCode

MOST_NODES = 300_000
_MOST_VISITED = 12
_DEEPEST = 5
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_GROWABLE = (list, dict, set, deque, OrderedDict, defaultdict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A name that keeps an object alive, the line that stores there, and the containers in between."""

    name: str
    place: Place | None
    containers: tuple[Any, ...] = ()  # from the one that holds the object to the one with the name


def find_holder(
    tensor: Any, user_code: UserCode, *, frame: FrameType | None = None, ignored: Sequence[Any] = ()
) -> Holder | None:
    """Return the nearest holder; the user's frames are searched from `frame` up (default: the caller's)."""
    frames = [each for each in _stack(frame or sys._getframe(1)) if user_code.is_user(each.f_code)]
    modules = {
        id(vars(module)): module for module in list(sys.modules.values()) if type(module) is ModuleType
    }
    files = {getattr(module, "__file__", None) for module in modules.values()}
    files |= {each.f_code.co_filename for each in frames}
    for file in files:
        if file and user_code.is_user_file(file):
            storing_lines(user_code.absolute(file))
    search = _Search(
        user_code=user_code, frames=frames, modules=modules, ignored={id(each) for each in ignored}
    )
    with alone():
        return search.run(tensor)


def held_by_python(tensors: Sequence[Any], user_code: UserCode, *, frame: FrameType) -> list[Any]:
    """Return those of `tensors` that a Python object or variable refers to; only a graph holds the others."""
    among = {id(tensor) for tensor in tensors}
    found: set[int] = set()
    for each in _stack(frame):
        if user_code.is_user(each.f_code):
            found |= {id(value) for _, value in _locals(each)} & among
    with alone():
        for referrer in gc.get_referrers(*tensors):
            if referrer is not tensors:
                found |= {id(value) for value in gc.get_referents(referrer)} & among
        del referrer
    return [tensor for tensor in tensors if id(tensor) in found]


def does_not_grow(found: Holder, sizes_before: dict[int, int]) -> bool:
    """Return whether the holder is bounded: a deque with a limit, or containers that have not grown.

    `sizes_before` maps the id of every earlier container to its length.
    """
    if any(type(container) is deque and container.maxlen is not None for container in found.containers):
        return True
    known = [each for each in found.containers if type(each) in _GROWABLE and id(each) in sizes_before]
    return bool(known) and all(len(container) <= sizes_before[id(container)] for container in known)


def container_sizes() -> dict[int, int]:
    """Return the length of every list, dict, set and deque, by id."""
    return {id(each): len(each) for each in live_objects(_GROWABLE)}


class _Search:
    """One walk up the referrers of one object."""

    def __init__(
        self,
        *,
        user_code: UserCode,
        frames: Sequence[FrameType],
        modules: dict[int, ModuleType],
        ignored: set[int],
    ) -> None:
        self.user_code, self.frames, self.modules = user_code, frames, modules
        self.ignored = ignored | {id(frames), id(modules), id(self.__dict__), id(ignored)}
        self.queued: list[tuple[Any, tuple[Any, ...]]] = []  # kept, so that no id is reused
        self.second_best: Holder | None = None  # a name that is not the user's

    def run(self, tensor: Any) -> Holder | None:
        self._queue(tensor, ())
        seen: set[int] = {id(tensor)}
        num_visited = 0
        while num_visited < min(_MOST_VISITED, len(self.queued)):
            each, containers = self.queued[num_visited]
            num_visited += 1
            found = self._in_frames(each, containers)
            if found is not None:
                return found
            for referrer in gc.get_referrers(each):
                if id(referrer) in self.ignored or id(referrer) in seen:
                    continue
                seen.add(id(referrer))
                found = self._named_by(referrer, each, containers)
                if found is not None:
                    return found
                if _is_a(referrer, *_CONTAINERS) and len(containers) < _DEEPEST:
                    self._queue(referrer, (*containers, referrer))
        return self.second_best

    def _queue(self, each: Any, containers: tuple[Any, ...]) -> None:
        entry = (each, containers)
        self.queued.append(entry)
        self.ignored |= {id(self.queued), id(entry), id(containers)}

    def _in_frames(self, value: Any, containers: tuple[Any, ...]) -> Holder | None:
        for frame in self.frames:
            name = next((name for name, each in _locals(frame) if each is value), None)
            if name is not None:
                return self._from_frame(frame, name, containers)
        return None

    def _from_frame(self, frame: FrameType, name: str, containers: tuple[Any, ...]) -> Holder:
        code = frame.f_code
        lines = None if code.co_name == "<module>" else _span(code)
        store = find_storing_line(self.user_code.absolute(code.co_filename), name, lines=lines)
        return self._holder(name, code.co_filename, store, containers)

    def _named_by(self, referrer: Any, value: Any, containers: tuple[Any, ...]) -> Holder | None:
        if type(referrer) is dict:
            return self._from_dict(referrer, value, containers)
        if type(referrer) is CellType:
            return self._from_cell(referrer, containers)
        if type(referrer) in (FrameType, GeneratorType):
            frame = referrer if type(referrer) is FrameType else referrer.gi_frame
            if frame is None or not self.user_code.is_user(frame.f_code):
                return None
            name = next((name for name, each in _locals(frame) if each is value), None)
            return None if name is None else self._from_frame(frame, name, containers)
        if _is_a(referrer, *_CONTAINERS, FunctionType, ModuleType, type):
            return None
        name = next((name for name, each in _attributes(referrer) if each is value), None)
        return None if name is None else self._from_attribute(referrer, name, containers)

    def _from_dict(self, namespace: dict[Any, Any], value: Any, containers: tuple[Any, ...]) -> Holder | None:
        key = next((key for key, each in list(namespace.items()) if each is value), None)
        if not isinstance(key, str):
            return None
        module = self.modules.get(id(namespace))
        if module is not None:
            file = getattr(module, "__file__", None)
            if not file or not self.user_code.is_user_file(file):
                return None
            return self._holder(key, file, find_storing_line(self.user_code.absolute(file), key), containers)
        for owner in gc.get_referrers(namespace):
            if not _is_a(owner, *_CONTAINERS, FrameType) and _namespace(owner) is namespace:
                return self._from_attribute(owner, key, containers)
        return None

    def _from_attribute(self, owner: Any, name: str, containers: tuple[Any, ...]) -> Holder | None:
        """Return an attribute; if the class is not the user's, only when nothing better turns up."""
        shown = f"{type(owner).__name__}.{name}"
        for file in self._files_of(type(owner)):
            store = find_storing_line(self.user_code.absolute(file), name, attribute=True)
            if store is not None:
                shown = f"self.{name}" if store.through_self else shown
                return self._holder(shown, file, store, containers)
        if self.second_best is None:
            self.second_best = Holder(name=shown, place=None, containers=containers)
        return None

    def _files_of(self, owner: type) -> Iterator[str]:
        """Yield files of the user that may store an attribute of `owner`, those of its classes first."""
        modules = [sys.modules.get(base.__module__) for base in owner.__mro__]
        files = [getattr(module, "__file__", None) for module in modules]
        files += [frame.f_code.co_filename for frame in self.frames]
        yield from dict.fromkeys(file for file in files if file and self.user_code.is_user_file(file))

    def _from_cell(self, cell: CellType, containers: tuple[Any, ...]) -> Holder | None:
        for closure in gc.get_referrers(cell):
            if type(closure) is not tuple:
                continue
            for function in gc.get_referrers(closure):
                if type(function) is not FunctionType or function.__closure__ is not closure:
                    continue
                position = next((i for i, each in enumerate(closure) if each is cell), None)
                if position is None or not self.user_code.is_user(function.__code__):
                    continue
                name, file = function.__code__.co_freevars[position], function.__code__.co_filename
                return self._holder(
                    name, file, find_storing_line(self.user_code.absolute(file), name), containers
                )
        return None

    def _holder(self, name: str, file: str, store: StoringLine | None, containers: tuple[Any, ...]) -> Holder:
        place = None
        if store is not None:
            place = self.user_code.place_at(file, line=store.line, function=store.function)
        return Holder(name=name, place=place, containers=containers)


def _is_a(each: Any, *classes: type) -> bool:
    # Not isinstance: it asks a proxy for its class, and a dead proxy raises.
    return issubclass(type(each), classes)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _locals(frame: FrameType) -> list[tuple[str, Any]]:
    """Return the variables of a frame.

    Up to Python 3.12 `f_locals` of a function is a copy that the frame keeps, which would keep every value
    alive; it is emptied again unless the function itself has called `locals()`.
    """
    variables = frame.f_locals
    found = list(variables.items())
    is_copy = sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_copy and sys.getrefcount(variables) <= 3:  # this name, the frame, the argument
        variables.clear()
    return found


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    namespace = _namespace(owner)
    return [] if namespace is None else [(key, each) for key, each in list(namespace.items())]


def _namespace(owner: Any) -> dict[str, Any] | None:
    # Not getattr: proxies answer for another object, and properties run code.
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _span(code: Any) -> tuple[int, int]:
    lines = [line for _, _, line in code.co_lines() if line]
    return min(lines), max(lines)


def old_nodes(tensors: Iterable[Any], *, before: int) -> list[list[int]]:
    """Return, for each tensor, the order numbers of its graph's nodes that were made before `before`.

    Tensors are taken in the given order, and a node counts for the first that reaches it.  Leaves do not
    count.  Old nodes are followed first, and the walk stops after `MOST_NODES` in all.
    """
    seen: set[Any] = set()
    found = []
    for tensor in tensors:
        mine: list[int] = []
        waiting = deque([graph_of(tensor)])
        while waiting and len(seen) < MOST_NODES:
            node = waiting.popleft()
            if node is None or node in seen or type(node).__name__ == "AccumulateGrad":
                continue
            seen.add(node)
            number = node._sequence_nr()
            is_old = number < before
            if is_old:
                mine.append(number)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    (waiting.appendleft if is_old else waiting.append)(following)
        found.append(mine)
    return found


def tensors_with_graph() -> list[Any]:
    """Return every live tensor that a differentiable operation made, oldest first."""
    import torch

    found = [
        (graph._sequence_nr(), each)
        for each in live_objects((torch.Tensor,))
        if (graph := graph_of(each)) is not None
    ]
    return [tensor for _, tensor in sorted(found, key=lambda pair: pair[0])]


def graph_of(tensor: Any) -> Any:
    """Return the node that made a tensor; None for a leaf."""
    if not tensor.requires_grad:
        return None
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view whose base was changed in a way that autograd cannot follow
        return None
