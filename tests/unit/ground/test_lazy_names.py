"""Names imported on first use."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from flatout.ground.lazy_names import lazy_names


def test_a_name_is_imported_once_and_an_unknown_one_is_an_attribute_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, home = ModuleType("lazy"), ModuleType("home_of_it")
    module.__dict__["__getattr__"] = lazy_names("lazy", {"answer": "home_of_it"})
    monkeypatch.setitem(sys.modules, "lazy", module)
    with pytest.raises(ModuleNotFoundError):
        _ = module.answer
    home.__dict__["answer"] = 42
    monkeypatch.setitem(sys.modules, "home_of_it", home)
    assert module.answer == 42 and vars(module)["answer"] == 42
    with pytest.raises(AttributeError, match="module 'lazy' has no attribute 'misspelt'"):
        _ = module.misspelt
