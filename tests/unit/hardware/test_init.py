"""What importing the room does not import."""

from __future__ import annotations

import json
import subprocess
import sys


def test_the_room_imports_neither_torch_nor_the_bindings() -> None:
    code = (
        "import sys, json, pkgutil, importlib, flatout.hardware as room\n"
        "names = [found.name for found in pkgutil.iter_modules(room.__path__, 'flatout.hardware.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "heavy = {'torch', 'numpy', 'pynvml', 'psutil', 'rich', 'typer'}\n"
        "print(json.dumps([len(names), sorted(heavy & sys.modules.keys())]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    num_modules, heavy = json.loads(done.stdout)
    assert num_modules > 8
    assert heavy == []
