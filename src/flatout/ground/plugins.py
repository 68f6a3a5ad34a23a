"""Extensions that other packages bring, found by their entry points.

A package names what it adds in its own pyproject.toml; nothing of Flatout is edited:

    [project.entry-points."flatout.adapter_tasks"]
    shout = "my_package.shout"
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from flatout.ground.errors import BadInput


def load_plugins(group: str) -> dict[str, Any]:
    """Load the objects of one group by the names of their entry points."""
    found: dict[str, Any] = {}
    for each in sorted(entry_points(group=group), key=lambda entry: entry.name):
        try:
            found[each.name] = each.load()
        except Exception as error:
            package = "a package" if each.dist is None else each.dist.name
            raise BadInput(
                f"{package} adds {each.name!r} to {group}, and {each.value} cannot be loaded: {error}",
                hint=f"mend or uninstall {package}",
            ) from error
    return found
