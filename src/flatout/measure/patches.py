"""Attribute replacements that can be taken back, newest first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any


class Patches:
    """What was replaced in the job's process, and how to put it back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        inherited = isinstance(owner, type) and name not in owner.__dict__
        before = (
            None if inherited else (owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name))
        )
        if isinstance(value, FunctionType):  # frameworks read the signature, Lightning that of DataLoader
            functools.update_wrapper(value, getattr(owner, name))
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name) if inherited else setattr(owner, name, before))

    def on_undo(self, action: Callable[[], None]) -> None:
        self._undo.append(action)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
