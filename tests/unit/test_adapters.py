"""The short names of adapters: each is the object of its home, and importing them costs nothing."""

from __future__ import annotations

import pytest

from flatout import adapters


@pytest.mark.parametrize("name", adapters.__all__)
def test_a_name_is_the_object_of_its_home(name: str) -> None:
    found = getattr(adapters, name)
    if name == "IGNORED":
        assert found == -100  # what torch's cross-entropy ignores
        return
    assert found.__name__ == name and found.__module__.startswith("flatout.engines.adapters.")


def test_the_names_are_listed() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'misspelt'"):
        _ = adapters.misspelt  # type: ignore[attr-defined]
    assert dir(adapters) == sorted(adapters.__all__)
