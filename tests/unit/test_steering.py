"""The short names of steering: each is the object of its home, and importing them costs nothing."""

from __future__ import annotations

import pytest

from flatout import steering


@pytest.mark.parametrize("name", steering.__all__)
def test_a_name_is_the_object_of_its_home(name: str) -> None:
    found = getattr(steering, name)
    assert found.__name__ == name and found.__module__.startswith("flatout.engines.steering.")


def test_the_names_are_listed() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'misspelt'"):
        _ = steering.misspelt  # type: ignore[attr-defined]
    assert dir(steering) == sorted(steering.__all__)
