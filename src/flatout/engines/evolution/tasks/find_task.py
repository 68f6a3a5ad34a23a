"""How a task is named: by its name, by its class, or by the file its prompts are in.

    digit-copy, arithmetic, countdown     generated; nothing else is needed
    gsm8k, translation, prompts           with path=FILE
    path/to/file.jsonl, or .csv           the task is the one with the fields of its first row
    my_package.my_task:MyTask             a class of your own; my_task.py:MyTask where it is a file
    a name of an installed package        an entry point of the group flatout.evolution_tasks

A task is a dataclass (see `task.EvolutionTask`), and its options are its fields: `length`, `digits`,
`heldout`.  They come as values or as written on a command line.  A task that takes its `reward` as an option
takes it by name, too (see `rewards.make_reward`).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from flatout.engines.evolution.rewards.kinds import Reward
from flatout.engines.evolution.rewards.make_reward import FORMS, make_reward
from flatout.engines.evolution.tasks.arithmetic import Arithmetic
from flatout.engines.evolution.tasks.countdown import Countdown
from flatout.engines.evolution.tasks.digit_copy import DigitCopy
from flatout.engines.evolution.tasks.gsm8k import Gsm8k
from flatout.engines.evolution.tasks.jsonl import FileTask
from flatout.engines.evolution.tasks.prompt_file import PromptFile
from flatout.engines.evolution.tasks.task import EvolutionTask, running, title_of
from flatout.engines.evolution.tasks.translation import SentenceTranslation
from flatout.engines.run.row_files import first_row
from flatout.ground.errors import BadInput, near_hint
from flatout.ground.user_code import import_named, load_plugins

GROUP = "flatout.evolution_tasks"
ATTRIBUTES = ("name", "reward", "max_new_tokens", "stop")
# Of tasks of files, the first whose fields a line has is its task.
OWN = (DigitCopy, Arithmetic, Countdown, PromptFile, Gsm8k, SentenceTranslation)
# What values of an option's type may be; of other types, those of tasks of users, nothing is known.
PLAIN: Mapping[Any, type] = {int: Integral, float: Real, bool: bool, str: str}


def find_task(name_or_path: str | Path, **options: Any) -> EvolutionTask:
    """Make a task from a name, a class or a file, with its options."""
    name = str(name_or_path)
    tasks = known_tasks()
    if name in tasks:
        task = tasks[name]
    elif ":" in name:
        task = _checked(import_named(name, what="task"), name)
    elif (path := Path(name_or_path)).is_file():
        task, options = _task_of(path, tasks), {"path": path, **options}
    else:
        known = (*tasks, "a .jsonl or .csv file", "or package.module:Class")
        raise BadInput(
            f"there is no task {name!r}, nor a file of this name", hint=near_hint(name, tasks, known)
        )
    settings = {key: _option(task, key, value) for key, value in options.items()}
    if issubclass(task, FileTask) and "path" not in settings:
        raise BadInput(
            f"the task {task.name} needs a file", hint=f"path=FILE with lines of {', '.join(task.fields)}"
        )
    needed = [each.name for each in dataclasses.fields(task) if _is_needed(each)]
    if missing := [key for key in needed if key not in settings]:
        title = title_of(task) if ":" in name else task.name
        raise BadInput(
            f"the task {title} needs the option {missing[0]}", hint=f"--task-option {missing[0]}=VALUE"
        )
    with running(task):
        made: EvolutionTask = task(**settings)
    return check_task(made)


def check_task(task: EvolutionTask) -> EvolutionTask:
    """Return a task object, or raise BadInput with what it lacks."""
    with running(task):
        missing = [name for name in (*ATTRIBUTES, "prompts") if not hasattr(task, name)]
        is_scored = not missing and callable(task.reward)
    if missing:
        raise BadInput(
            f"the task {title_of(task)} has no {missing[0]}", hint=f"a task has {', '.join(ATTRIBUTES)}"
        )
    if not is_scored:
        raise BadInput(f"the reward of the task {title_of(task)} is not a function", hint=FORMS)
    return task


def options_of(task: Any) -> dict[str, Any]:
    """Return the options that an object was made with, as a run records them."""
    if not dataclasses.is_dataclass(task):
        return {}
    return {each.name: _plain(getattr(task, each.name)) for each in dataclasses.fields(task) if each.init}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **inside}
    if isinstance(value, Path):
        return str(value)
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_needed(option: dataclasses.Field[Any]) -> bool:
    return option.init and option.default is option.default_factory is dataclasses.MISSING


def known_tasks() -> dict[str, type[Any]]:
    """Return the classes of tasks by name: Flatout's own and those of installed packages."""
    tasks: dict[str, type[Any]] = {task.name: task for task in OWN}
    for name, found in load_plugins(GROUP).items():
        if name in tasks:
            raise BadInput(f"two tasks are named {name!r}", hint=f"rename the entry point of {GROUP}")
        tasks[name] = _checked(found, name)
    return tasks


def _checked(found: object, name: str) -> type[Any]:
    if isinstance(found, type) and dataclasses.is_dataclass(found) and hasattr(found, "prompts"):
        return found
    raise BadInput(
        f"the task {name!r} is not a dataclass with prompts",
        hint="subclass GeneratedTask or FileTask of flatout.evolution",
    )


def _task_of(path: Path, tasks: Mapping[str, type[Any]]) -> type[FileTask]:
    """Find the task whose fields the first row of a file has."""
    of_files = [task for task in tasks.values() if issubclass(task, FileTask)]
    shapes = ", or with ".join(f"{' and '.join(task.fields)} ({task.name})" for task in of_files)
    place, record = first_row(path, hint=f"give lines with {shapes}")
    for task in of_files:
        if isinstance(record, dict) and set(task.fields) <= set(record):
            return task
    found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    raise BadInput(f"{place} has {found}: it fits no task", hint=f"give lines with {shapes}")


def _option(task: Any, key: str, value: Any) -> Any:
    """Convert an option to what its task wants; a text is read as the type of the field."""
    known = [field.name for field in dataclasses.fields(task) if field.init]
    if key not in known:
        raise BadInput(f"the task {task.name} has no option {key!r}", hint=f"known: {', '.join(known)}")
    kind = typing.get_type_hints(task)[key]
    if kind is Reward:
        return make_reward(value)
    if kind == tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise BadInput(
                f"{key}={value!r} of the task {task.name} is not a text or a list of texts",
                hint="a number in quotes is a text",
            )
        return tuple(texts)
    if not isinstance(value, str):
        if kind in PLAIN and (
            not isinstance(value, PLAIN[kind]) or isinstance(value, bool) != (kind is bool)
        ):
            raise BadInput(f"{key}={value!r} of the task {task.name} is not {kind.__name__}")
        return value
    if kind is str:
        return value
    if kind in (Path, Path | None):
        return Path(value)
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise BadInput(f"{key}={value!r} of the task {task.name} is neither true nor false")
        return value.lower() == "true"
    try:
        return kind(value)
    except ValueError:
        raise BadInput(f"{key}={value!r} of the task {task.name} cannot be read as {kind.__name__}") from None
