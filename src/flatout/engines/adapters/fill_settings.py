"""Settings that files decide, filled in before a run begins.

The adapter that a task begins from (`init`) has its own rank, alpha and targets, and the rows of a task may
decide its labels or the unit of its numbers.  The run keeps all of them in its settings: they decide the
shapes of heads and factors, and neither the rows nor the adapter are needed later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.engines.adapters.assembly import make_task, read_splits
from flatout.engines.adapters.peft_format import read_adapter
from flatout.engines.adapters.settings import AdaptSettings, TaskSettings
from flatout.engines.adapters.tasks.data_rows import Splits
from flatout.ground.errors import BadInput

OF_ADAPTER = ("rank", "alpha", "targets")


def fill_settings(
    settings: AdaptSettings, *, saved: Mapping[str, Any] | None = None
) -> tuple[AdaptSettings, dict[str, Splits]]:
    """Return the settings completed from files, and the rows that were read for it, by task.

    `saved` settings come first: a run continues as it began, even if the files have changed.
    """
    tasks, read = {}, {}
    for name, given in settings.tasks.items():
        kept = ((saved or {}).get("tasks") or {}).get(name) or {}
        filled = given if settings.heads_only else _from_adapter(given, kept, name=name)
        asked = make_task(settings, name)
        missing = [key for key in asked.from_rows if key not in filled.settings]
        known = kept.get("settings") or {}
        decided = {key: known[key] for key in missing if key in known}
        if missing and not decided:
            read[name] = read_splits(asked, given, name=name)
            decided = asked.settings_from(read[name])
        tasks[name] = dataclasses.replace(filled, settings={**filled.settings, **decided})
    return dataclasses.replace(settings, tasks=tasks), read


def _from_adapter(given: TaskSettings, kept: Mapping[str, Any], *, name: str) -> TaskSettings:
    """Complete a task's settings with those of the adapter it begins from."""
    if given.init is None:
        return given
    brought: dict[str, Any] = {key: kept.get(key) for key in OF_ADAPTER}
    if brought["rank"] is None:
        adapter = read_adapter(Path(given.init))
        brought = {key: getattr(adapter, key) for key in OF_ADAPTER}
    for key, value in brought.items():
        own = getattr(given, key)
        if own is not None and value is not None and own != value and key != "targets":
            raise BadInput(
                f"tasks.{name}.{key}={own:g}, and the adapter in {given.init} has {value:g}",
                hint=f"omit {key}: it comes from the adapter",
            )
    if given.targets is not None and list(given.targets) != list(brought["targets"] or given.targets):
        raise BadInput(
            f"the targets of tasks.{name} differ from those of the adapter in {given.init}",
            hint="omit targets: they come from the adapter",
        )
    brought["targets"] = tuple(brought["targets"] or ())
    return dataclasses.replace(given, **brought)
