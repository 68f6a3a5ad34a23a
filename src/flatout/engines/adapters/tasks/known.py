"""Tasks by name: a task is a file with a subclass of `AdapterTask`.

The file lies in `kinds`, in a folder of the user (`tasks_folder`), or in an installed package that names it
as an entry point of the group `flatout.adapter_tasks`: a module, or the class itself.  An error that a user's
file or a package raises is shown with its own file and line.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flatout.engines.adapters.tasks import kinds
from flatout.engines.adapters.tasks.task import AdapterTask
from flatout.ground.errors import BadInput, FlatoutError, is_interrupt, near_hint
from flatout.ground.user_code import import_file, load_plugins

GROUP = "flatout.adapter_tasks"
LOADED = "flatout_task_"  # begins the name of a module that is loaded from the user's folder


def known_tasks(folder: Path | None = None) -> dict[str, type[AdapterTask]]:
    """Return tasks by name: Flatout's own, those of installed packages, those of the user's folder."""
    tasks: dict[str, type[AdapterTask]] = {}
    for place, task in (*_own_tasks(), *_installed_tasks(), *_tasks_in(folder)):
        if task.name in tasks:
            raise BadInput(f"two tasks are named {task.name!r}", hint=f"rename that of {place}")
        tasks[task.name] = task
    return tasks


def task_named(name: str, *, folder: Path | None = None, **settings: Any) -> AdapterTask:
    """Make the task of this name, with its settings."""
    tasks = known_tasks(folder)
    if name not in tasks:
        raise BadInput(f"there is no task {name!r}", hint=near_hint(name, sorted(tasks)))
    known = inspect.signature(tasks[name]).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for key in settings:
        if key not in known and not takes_any:
            raise BadInput(
                f"the task {name} has no setting {key!r}",
                hint=near_hint(key, known) if known else f"{name} has none: omit settings",
            )
    return tasks[name](**settings)


@contextmanager
def naming_task_files() -> Iterator[None]:
    """Turn an error inside a user's or a package's task into BadInput with its file and line."""
    try:
        yield
    except (FlatoutError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        packages = {entry.module.partition(".")[0] for entry in entry_points(group=GROUP)}
        places = [
            (Path(frame.f_code.co_filename), line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if (name := frame.f_globals.get("__name__", "")).startswith(LOADED)
            or name.partition(".")[0] in packages
        ]
        if not places or is_interrupt(error):
            raise
        path, line = places[-1]
        said = traceback.format_exception_only(error)[-1].strip()
        raise BadInput(f"the task file {path.name} raised {said}", hint=f"at {path}:{line}") from error


Definition = tuple[object, type[AdapterTask]]  # (where it lies, the class)


def _own_tasks() -> Iterator[Definition]:
    for found in pkgutil.iter_modules(kinds.__path__, f"{kinds.__name__}."):
        yield from _tasks_of(importlib.import_module(found.name))


def _installed_tasks() -> Iterator[Definition]:
    for name, value in load_plugins(GROUP).items():
        if isinstance(value, ModuleType):
            yield from _users_tasks_of(value)
        elif inspect.isclass(value) and issubclass(value, AdapterTask):
            yield f"the entry point {name}", value
        else:
            raise BadInput(
                f"the entry point {name} of {GROUP} is not an adapter task", hint="name a module or a class"
            )


def _tasks_in(folder: Path | None) -> Iterator[Definition]:
    if folder is None:
        return
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder of tasks", hint="give a folder with one file per task")
    for path in sorted(folder.glob("*.py")):
        if not path.stem.startswith("_"):
            yield from _users_tasks_of(import_file(path, name=f"{LOADED}{path.stem}"))


def _tasks_of(module: ModuleType) -> Iterator[Definition]:
    """Yield the tasks that a module defines; one that it imports belongs to another file."""
    for value in vars(module).values():
        if not inspect.isclass(value) or value.__module__ != module.__name__:
            continue
        if issubclass(value, AdapterTask) and not inspect.isabstract(value):
            yield module.__file__, value


def _users_tasks_of(module: ModuleType) -> list[Definition]:
    """Return the tasks of a module that is not Flatout's; refuse one that lacks a method."""
    found = list(_tasks_of(module))
    for value in vars(module).values() if not found else ():
        if (
            inspect.isabstract(value)
            and issubclass(value, AdapterTask)
            and value.__module__ == module.__name__
        ):
            missing = ", ".join(sorted(value.__abstractmethods__))
            raise BadInput(f"the task {value.__name__} of {module.__file__} has no {missing}", hint="add it")
    return found
