"""Names imported on first use."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

DOOR = """
from typing import TYPE_CHECKING
from flatout.ground.lazy_names import lazy_names
if TYPE_CHECKING:
    from home_of_it import answer as answer
    from absent_home import nothing as nothing
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
"""


def test_a_name_is_imported_once_and_an_unknown_one_is_an_attribute_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "door.py").write_text(DOOR)
    (tmp_path / "home_of_it.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("door", "home_of_it"):
        monkeypatch.setitem(sys.modules, name, None)  # taken out again at the end
        del sys.modules[name]
    door = importlib.import_module("door")
    assert dir(door) == door.__all__ == ["answer", "nothing"]
    assert "answer" not in vars(door) and "home_of_it" not in sys.modules
    assert door.answer == 42 and vars(door)["answer"] == 42
    with pytest.raises(ModuleNotFoundError):
        _ = door.nothing
    with pytest.raises(AttributeError, match="module 'door' has no attribute 'misspelt'"):
        _ = door.misspelt
