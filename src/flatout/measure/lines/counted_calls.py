"""Calls of torch that are not operators, by line, while calls are counted.

Checkpointed parts of a model, `torch.cuda.empty_cache` and `torch.cuda.synchronize` pass through no
torch-function mode, so these few functions are patched for the counted steps.  Neither do the constructors
from before `torch.tensor`: `torch.FloatTensor(rows)` and `torch.Tensor(rows)`.  A hook of torch's sees the
modules inside the model: which line of the user's calls them, how many there are, and with how many rows.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

from flatout.measure.clock import now
from flatout.measure.evidence import InnerCalls, Place
from flatout.measure.lines.module_calls import leading_rows
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode

MODULE_FILE = os.path.join("torch", "nn", "modules", "module.py")
# Functions of torch.distributed in which ranks wait for each other; DTensor has some of its own.
COLLECTIVE = re.compile(r"(all_(gather|reduce|to_all)|reduce|gather|scatter|broadcast|barrier|wait_tensor)")
FEWEST_MODULES = 4
MOST_LINES = 40
Note = Callable[[str, FrameType, str, float], None]  # operation, caller, device, seconds
NoteCreation = Callable[[str, tuple[Any, ...], Any, FrameType, float], None]  # name, arguments, tensor, ...


def count_calls(note: Note, patches: Patches) -> None:
    """Report such calls until `patches` are undone."""
    import torch
    from torch.utils import checkpoint

    def counted(function: Callable[..., Any], op: str, device: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return function(*args, **kwargs)
            finally:
                note(op, sys._getframe(1), device, now() - start)

        return call

    for name in ("empty_cache", "synchronize"):
        patches.replace(torch.cuda, name, counted(getattr(torch.cuda, name), name, "cuda"))
    for module, name in list(_collectives()):
        patches.replace(module, name, counted(getattr(module, name), name, "cpu"))
    name = checkpoint_generator()
    patches.replace(checkpoint, name, counted(getattr(checkpoint, name), "checkpoint", "cpu"))
    apply: Callable[..., Any] = checkpoint.CheckpointFunction.apply

    class Counted:
        """Counts the calls of the function that reentrant checkpoints use."""

        @staticmethod
        def apply(*args: Any) -> Any:
            note("checkpoint", sys._getframe(1), "cpu", 0.0)
            return apply(*args)

    patches.replace(checkpoint, "CheckpointFunction", Counted)


def _collectives() -> Iterator[tuple[Any, str]]:
    """Yield the modules and names of the collectives of a job of several ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    for module in (distributed, sys.modules.get("torch.distributed._functional_collectives")):
        for name, function in vars(module).items():
            if COLLECTIVE.match(name) and type(function) is FunctionType:
                yield module, name


def checkpoint_generator() -> str:
    """Name the function of torch.utils.checkpoint that checkpoints without reentrance go through."""
    from torch.utils import checkpoint

    name = "_checkpoint_without_reentrant_generator"
    from_2_15 = f"{name}_impl"
    return from_2_15 if hasattr(checkpoint, from_2_15) else name


def count_creations(note: NoteCreation, patches: Patches) -> None:
    """Report tensors that `torch.FloatTensor`, its siblings and `torch.Tensor` make, until an undo."""
    import torch

    for kind in torch._tensor_classes:
        owner = sys.modules.get(kind.__module__)
        current = getattr(owner, kind.__name__, None)
        if current is kind or isinstance(current, _CountedType):  # two instruments may count at a time
            full_name = f"{kind.__module__}.{kind.__name__}"  # torch reads it: x.type(torch.LongTensor)
            names = {"__module__": kind.__module__, "__qualname__": kind.__name__}  # pickle reads these
            calls = {"kind": current, "name": kind.__name__, "note": staticmethod(note)}
            counted = _CountedType(full_name, (), {**calls, **names})
            patches.replace(owner, kind.__name__, counted)
    set_default = torch._C._set_default_tensor_type

    def set_default_of(kind: Any) -> None:
        set_default(kind.kind if isinstance(kind, _CountedType) else kind)

    patches.replace(torch._C, "_set_default_tensor_type", set_default_of)

    def made(tensor: Any, *args: Any, **kwargs: Any) -> None:
        if type(tensor) is torch.Tensor:  # only a call of the class comes here, not an operator's result
            start = now()
            torch.Tensor.__new__(torch.Tensor, *args, **kwargs)  # again: the first has ended by now
            note("Tensor", args, tensor, sys._getframe(1), now() - start)

    patches.replace(torch.Tensor, "__init__", made)


class _CountedType(type):
    """Stands for a type of tensors: makes them, knows them, and has its attributes."""

    kind: Any
    name: str
    note: NoteCreation

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        start = now()
        tensor = cls.kind(*args, **kwargs)
        cls.note(cls.name, args, tensor, sys._getframe(1), now() - start)
        return tensor

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kind)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.kind, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.kind

    def __hash__(cls) -> int:
        return hash(cls.kind)

    def __repr__(cls) -> str:
        return repr(cls.kind)


@dataclass(slots=True)
class _Calls:
    calls: int = 0
    rows: defaultdict[int, set[int | None]] = field(default_factory=lambda: defaultdict(set))  # by module
    last_rows: int | None = None
    changes: int = 0  # from one call to the next, in the number of rows

    def note(self, module: Any, rows: int | None) -> None:
        self.changes += self.calls > 0 and rows != self.last_rows
        self.calls, self.last_rows = self.calls + 1, rows
        self.rows[id(module)].add(rows)

    @property
    def rows_differ(self) -> bool:
        """Tell experts from layers: a second network may get other rows, but its layers all get the same."""
        return len({frozenset(rows) for rows in self.rows.values()}) > 1 and self.changes * 2 > self.calls


class InnerModules:
    """Modules with parameters, by the user's line that calls them."""

    def __init__(self, user_code: UserCode) -> None:
        self._user_code = user_code
        self._calls: defaultdict[tuple[str, Place], _Calls] = defaultdict(_Calls)
        self.num_steps = 0
        self.failure: Exception | None = None

    def watch(self, patches: Patches) -> None:
        """Watch module calls until `patches` are undone."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        patches.on_undo(register_module_forward_pre_hook(self._note_safely).remove)

    def _note_safely(self, module: Any, args: Any) -> None:
        if self.failure is None:
            try:
                self._note(module, args, sys._getframe(1))
            except Exception as error:  # noqa: BLE001 - ours; the job's call goes on
                self.failure = error

    def _note(self, module: Any, args: Any, caller: FrameType) -> None:
        frame: FrameType | None = caller
        while frame is not None and frame.f_code.co_filename.endswith(MODULE_FILE):
            frame = frame.f_back
        place, via = self._user_code.place(frame)
        if place is None or via is not None or next(module.parameters(), None) is None:
            return
        self._calls[type(module).__name__, place].note(module, leading_rows(args))

    def evidence(self) -> tuple[InnerCalls, ...]:
        """Return lines that call several modules of a kind, most calls first."""
        several = [item for item in self._calls.items() if len(item[1].rows) >= FEWEST_MODULES]
        return tuple(
            InnerCalls(
                module=module,
                place=place,
                calls_per_step=calls.calls / max(1, self.num_steps),
                num_modules=len(calls.rows),
                rows_differ=calls.rows_differ,
            )
            for (module, place), calls in sorted(several, key=lambda item: -item[1].calls)[:MOST_LINES]
        )
