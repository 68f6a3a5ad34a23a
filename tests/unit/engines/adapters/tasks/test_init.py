"""The room's names."""

from __future__ import annotations

from flatout.engines.adapters import tasks


def test_names_are_there() -> None:
    assert tasks.__all__ and all(hasattr(tasks, name) for name in tasks.__all__)
