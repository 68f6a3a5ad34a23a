"""Reversible attribute replacements, undone newest first.

torch.compile would take a replacement for the user's function: every module called through one wrapper shares
its code, and after a few of them dynamo gives up on that code.  So dynamo is told to skip our frames and to
continue with the frames they call.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

COMPILED, DYNAMOS_CALLS = "compile_wrapper", os.path.join("torch", "_dynamo", "eval_frame.py")


class Patches:
    """What was replaced in the job's process, and how to restore it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        inherited = isinstance(owner, type) and name not in owner.__dict__
        before = (
            None if inherited else (owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name))
        )
        if isinstance(value, FunctionType):  # frameworks read the signature: Lightning DataLoader's
            functools.update_wrapper(value, getattr(owner, name))
            _hide_from_dynamo(value.__code__)
        setattr(owner, name, value)

        def put_back() -> None:
            if vars(owner).get(name) is not value:
                return  # the job replaced it in turn: its own function stays, and calls ours
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(put_back)

    def around(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
        """Decorate the replacement of a method; it gets the original before the arguments."""

        def replace(function: Callable[..., Any]) -> None:
            real = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                return function(real, *args, **kwargs)

            self.replace(owner, name, call)
            _hide_from_dynamo(function.__code__)

        return replace

    def on_undo(self, action: Callable[[], None]) -> None:
        self._undo.append(action)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def keep_out_of_graphs(*functions: Any) -> None:
    """Tell dynamo to compile neither these functions, which replacements call, nor what they call."""
    for function in functions:
        _hide_from_dynamo(function.__code__, with_calls=True)


def compile_sizes_apart(patches: Patches) -> None:
    """Let dynamo compile a batch of another size for that size alone, until `patches` are undone.

    Otherwise it compiles for any size, and from then on runs batches of the usual size with that code, too.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is None or not config.automatic_dynamic_shapes:
        return

    def put_back() -> None:
        config.automatic_dynamic_shapes = True

    patches.on_undo(put_back)
    config.automatic_dynamic_shapes = False


def in_compiled_function() -> bool:
    """Return whether a function that torch.compile compiles is on this thread's stack.

    Its graphs guard on the thread's modes, and it restores the thread's dispatch keys when it ends.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "torch._dynamo.eval_frame" in sys.modules:
        if frame.f_code.co_name == COMPILED and frame.f_code.co_filename.endswith(DYNAMOS_CALLS):
            return True
        frame = frame.f_back
    return False


def _hide_from_dynamo(code: CodeType, *, with_calls: bool = False) -> None:
    """Tell dynamo to skip frames of `code`; torch's C code remembers it before dynamo is imported."""
    if "torch" in sys.modules:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        inside = _FrameAction.SKIP if with_calls else _FrameAction.DEFAULT
        set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, inside))
