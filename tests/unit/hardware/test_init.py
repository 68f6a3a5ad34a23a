"""The room's surface, and what importing it does not import."""

from __future__ import annotations

import json
import subprocess
import sys

import flatout.hardware


def test_every_name_of_the_surface_is_there() -> None:
    assert len(set(flatout.hardware.__all__)) == len(flatout.hardware.__all__) > 10
    for name in flatout.hardware.__all__:
        assert getattr(flatout.hardware, name) is not None


def test_the_room_imports_neither_torch_nor_the_bindings() -> None:
    code = (
        "import sys, json, flatout.hardware;"
        "heavy = {'torch', 'numpy', 'pynvml', 'psutil', 'rich', 'typer'};"
        "print(json.dumps(sorted(heavy & sys.modules.keys())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
