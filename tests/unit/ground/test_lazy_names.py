"""Names imported on first use."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from flatout.ground.lazy_names import homes_of, lazy_names


def test_a_name_is_imported_once_and_an_unknown_one_is_an_attribute_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, home = ModuleType("lazy"), ModuleType("home.of_it")
    module.__dict__["__getattr__"], listed = lazy_names("lazy", homes_of({"of_it": ("answer",)}, room="home"))
    monkeypatch.setitem(sys.modules, "lazy", module)
    with pytest.raises(ModuleNotFoundError):
        _ = module.answer
    home.__dict__["answer"] = 42
    monkeypatch.setitem(sys.modules, "home.of_it", home)
    assert module.answer == 42 and vars(module)["answer"] == 42
    with pytest.raises(AttributeError, match="module 'lazy' has no attribute 'misspelt'"):
        _ = module.misspelt
    module.__dict__["__all__"] = ["b", "a"]
    assert listed() == ["a", "b"]
