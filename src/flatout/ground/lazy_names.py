"""Names of a module that are imported on first use, so that importing the module costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(module: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Make the `__getattr__` of `module`; `homes` says which module has which name.

    Define it where a type checker does not see it: that would take every misspelt name for an object.
    """

    def resolve(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return resolve
