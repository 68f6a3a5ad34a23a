"""The short names of evolution: each is the object of its home, and importing them costs nothing."""

from __future__ import annotations

import pytest

from flatout import evolution


@pytest.mark.parametrize("name", evolution.__all__)
def test_a_name_is_the_object_of_its_home(name: str) -> None:
    found = getattr(evolution, name)
    assert found.__name__ == name and found.__module__.startswith("flatout.engines.evolution.")


def test_the_names_are_listed() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'misspelt'"):
        _ = evolution.misspelt  # type: ignore[attr-defined]
    assert dir(evolution) == sorted(evolution.__all__)
