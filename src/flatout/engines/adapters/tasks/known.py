"""Tasks by name: a task is a file, in this folder or in one of the user's, with a subclass of `Task`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.engines.adapters.tasks.task import Task
from flatout.errors import BadInput

HERE = Path(__file__).parent


def known_tasks(folder: Path | None = None) -> dict[str, type[Task]]:
    """Tasks by name: those that come with the product, then those of the user's folder."""
    modules = list(_own_modules())
    if folder is not None:
        if not folder.is_dir():
            raise BadInput(f"{folder} is no folder of tasks", hint="give a folder with one file per task")
        modules += [_loaded(path) for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")]
    tasks: dict[str, type[Task]] = {}
    for module in modules:
        for task in _tasks_of(module):
            if task.name in tasks:
                raise BadInput(f"two tasks are named {task.name!r}", hint=f"rename that of {module.__file__}")
            tasks[task.name] = task
    return tasks


def task_named(name: str, *, folder: Path | None = None, **settings: Any) -> Task:
    """The task of this name, with its settings."""
    tasks = known_tasks(folder)
    if name not in tasks:
        near = difflib.get_close_matches(name, tasks, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(tasks))}"
        raise BadInput(f"there is no task {name!r}", hint=hint)
    try:
        return tasks[name](**settings)
    except TypeError as error:
        raise BadInput(f"{name} cannot take {', '.join(settings)}: {error}") from error


def _own_modules() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules([str(HERE)]):
        if found.name != "known":
            yield importlib.import_module(f"{__package__}.{found.name}")


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"flatout_task_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where a dataclass looks up the names in its annotations
    spec.loader.exec_module(module)
    return module


def _tasks_of(module: ModuleType) -> list[type[Task]]:
    """Tasks that a module defines; one it imports belongs to another file."""
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Task)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
