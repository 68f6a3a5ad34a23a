"""How a task is named: by its name, or by the file its prompts are in.

    digit-copy, arithmetic, countdown     generated; nothing else is needed
    gsm8k, translation                    with path=FILE
    path/to/file.jsonl                    the kind is read off the fields of its first line

Options are the fields of the task (`length`, `digits`, `heldout`, ...), as values or as written on a command
line.  A task that takes its `reward` as an option takes it by name, too (see `rewards.reward_named`).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flatout.engines.evolution.rewards.rewards import Reward, reward_named
from flatout.engines.evolution.tasks.arithmetic import Arithmetic
from flatout.engines.evolution.tasks.countdown import Countdown
from flatout.engines.evolution.tasks.digit_copy import DigitCopy
from flatout.engines.evolution.tasks.gsm8k import FIELDS as GSM8K_FIELDS
from flatout.engines.evolution.tasks.gsm8k import Gsm8k
from flatout.engines.evolution.tasks.task import Task
from flatout.engines.evolution.tasks.translation import FIELDS as TRANSLATION_FIELDS
from flatout.engines.evolution.tasks.translation import Translation
from flatout.errors import BadInput

TASKS: dict[str, Callable[..., Task]] = {
    task.name: task for task in (DigitCopy, Arithmetic, Countdown, Gsm8k, Translation)
}
_KINDS = {"gsm8k": GSM8K_FIELDS, "translation": TRANSLATION_FIELDS}


def task_named(name_or_path: str | Path, **options: Any) -> Task:
    """The task that a name or a file stands for, with its options."""
    name = str(name_or_path)
    if name not in TASKS:
        path = Path(name_or_path)
        if not path.is_file():
            near = difflib.get_close_matches(name, TASKS, n=1)
            raise BadInput(
                f"there is no task {name!r}, nor a file of this name",
                hint=f"did you mean {near[0]}?" if near else f"known: {', '.join(TASKS)}, or a .jsonl file",
            )
        name, options = _kind_of(path), {"path": path, **options}
    task = TASKS[name]
    settings = {key: _setting(task, name, key, value) for key, value in options.items()}
    if name in _KINDS and "path" not in settings:
        raise BadInput(
            f"the task {name} needs a file", hint=f"path=FILE with lines of {', '.join(_KINDS[name])}"
        )
    return task(**settings)


def _kind_of(path: Path) -> str:
    """The task whose fields the first line of a file has."""
    number, first = 1, ""
    try:
        with path.open(encoding="utf-8-sig") as file:
            number, first = next(((n, line) for n, line in enumerate(file, start=1) if line.strip()), (1, ""))
        record = json.loads(first)
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}:{number} is no JSON object: {error}", hint=_KINDS_HINT) from error
    for name, fields in _KINDS.items():
        if isinstance(record, dict) and set(fields) <= set(record):
            return name
    found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    raise BadInput(f"{path}:{number} has {found}: it fits no task", hint=_KINDS_HINT)


_KINDS_HINT = "give lines with " + ", or with ".join(
    f"{' and '.join(fields)} ({name})" for name, fields in _KINDS.items()
)


def _setting(task: Any, name: str, key: str, value: Any) -> Any:
    """An option as its task wants it; a text is read as the type of the field."""
    kinds = typing.get_type_hints(task)
    known = [field.name for field in dataclasses.fields(task) if field.init]
    if key not in known:
        raise BadInput(f"the task {name} has no option {key!r}", hint=f"known: {', '.join(known)}")
    kind = kinds[key]
    if not isinstance(value, str) or kind is str:
        return value
    if kind is Reward:
        return reward_named(value)
    if kind in (Path, Path | None):
        return Path(value)
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise BadInput(f"{key}={value!r} of the task {name} is neither true nor false")
        return value.lower() == "true"
    try:
        return kind(value)
    except ValueError:
        raise BadInput(f"{key}={value!r} of the task {name} is no {kind.__name__}") from None
