"""Names of a module that are imported on first use, so that importing the module costs nothing.

    if TYPE_CHECKING:
        from package.home import name as name
    else:
        __all__, __getattr__, __dir__ = lazy_names(__name__)

What a type checker reads is the one list of them: the module's own source says where each name comes from.
"""

from __future__ import annotations

import importlib
import linecache
import re
import sys
from collections.abc import Callable

IMPORTED = re.compile(r"^    from (\S+) import (\w+) as \2$", re.MULTILINE)


def lazy_names(module: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Make `__all__`, `__getattr__` and `__dir__` of a module of the names in its block for type checkers.

    Define them where a type checker does not see them: it would take every misspelt name for an object.
    """
    this = sys.modules[module]
    source = "".join(linecache.getlines(this.__file__ or "", vars(this)))
    homes = {name: home for home, name in IMPORTED.findall(source)}

    def resolve(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(this, name, value)
        return value

    return sorted(homes), resolve, lambda: sorted(this.__all__)
