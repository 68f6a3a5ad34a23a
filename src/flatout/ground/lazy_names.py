"""Names of a module that are imported on first use, so that importing the module costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def homes_of(names: Mapping[str, tuple[str, ...]], *, room: str) -> dict[str, str]:
    """Turn the names of each module of a room into the module of each name, in alphabetical order."""
    return {name: f"{room}.{home}" for name, home in sorted((n, h) for h, ns in names.items() for n in ns)}


def lazy_names(
    module: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of `module`; `homes` says which module has which name.

    Define them where a type checker does not see them: it would take every misspelt name for an object.
    """

    def resolve(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return resolve, lambda: sorted(sys.modules[module].__all__)
