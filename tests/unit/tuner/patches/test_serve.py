"""Served texts are imported, files and their bytecode are not."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from flatout.ground.script.main import read_code
from flatout.measure.patches import Patches
from flatout.tuner.patches.serve import serve


def test_a_served_text_stands_in_for_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "served_module.py"
    file.write_text("def value():\n    return 1\n")
    importlib.invalidate_caches()
    assert importlib.import_module("served_module").value() == 1  # and its bytecode is kept
    cached = {path.name: path.read_bytes() for path in (tmp_path / "__pycache__").glob("*")}
    del sys.modules["served_module"]
    patches = Patches()
    serve({str(file): "def value():\n    x = 2\n    return x\n"}, patches)
    try:
        module = importlib.import_module("served_module")
        assert module.value() == 2 and "x = 2" in inspect.getsource(module.value)
        found: dict[str, object] = {}
        exec(read_code(str(file)), found)
        assert found["value"]() == 2  # type: ignore[operator]
    finally:
        patches.undo()
        del sys.modules["served_module"]
    assert importlib.import_module("served_module").value() == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "__pycache__").glob("*")} == cached
    del sys.modules["served_module"]
