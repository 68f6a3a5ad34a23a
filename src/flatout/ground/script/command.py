"""The command of a user's script or module, checked before anything starts."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.ground.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptCommand:
    """A script with its arguments or, with `module`, the name of a module with its own."""

    command: tuple[str, ...]
    module: bool

    @property
    def words(self) -> tuple[str, ...]:
        """What follows `python`."""
        return ("-m", *self.command) if self.module else self.command


def check_command(command: Sequence[str], *, module: bool) -> None:
    """Raise BadInput before anything starts when there is nothing to run."""
    if not command:
        raise BadInput("no script given", hint="name it last: train.py ARGS…")
    target = command[0]
    if module:
        _check_module(target)
        return
    path = Path(target)
    if not path.exists():
        raise BadInput(f"no script at {target}", hint="check the path, or use -m for a module")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise BadInput(f"{target} is a folder", hint="name the script inside it")
    if not os.access(path, os.R_OK):
        raise BadInput(f"{target} cannot be read", hint="check its permissions")
    if path.suffix == ".ipynb":
        raise BadInput(
            f"{target} is a notebook, not a script",
            hint="call flatout.diagnose(step, loader) in a cell, or write it as a script with "
            "'jupyter nbconvert --to script'",
        )


def _check_module(name: str) -> None:
    """Raise BadInput for a module `python -m` would not find; none of its packages is imported."""
    parts = name.split(".")
    hint = "a file is run without -m" if name.endswith(".py") else None
    if not all(part.isidentifier() for part in parts):
        raise BadInput(f"{name!r} is not a module name", hint=hint)
    places: Sequence[str] | None = None
    for i in range(len(parts)):
        part = ".".join(parts[: i + 1])
        try:
            spec = _spec(part, places)
        except KeyError:
            return  # a namespace package inside a package: only importing it can tell
        if spec is None:
            raise BadInput(
                f"there is no module {part!r} in this folder or on Python's path",
                hint="run in the folder that holds it, or add that folder to PYTHONPATH",
            )
        places = spec.submodule_search_locations
        if places is None and part != name:
            raise BadInput(f"there is no module {name!r}: {part!r} is not a package", hint=hint)
    if places is not None and _spec(f"{name}.__main__", places) is None:
        raise BadInput(
            f"{name!r} is a package without __main__", hint=f"name one of its modules: {name}.train"
        )


def _spec(name: str, places: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    here = importlib.machinery.PathFinder.find_spec(name, [os.getcwd()]) if places is None else None
    if here is not None and here.loader is not None:
        return here
    found = (finder.find_spec(name, places) for finder in sys.meta_path)
    # A bare folder of this name counts only if no real module has it.
    return next((spec for spec in found if spec is not None), here)
