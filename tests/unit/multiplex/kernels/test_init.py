"""Whether triton is here is known without importing it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from flatout.multiplex.kernels import HAS_TRITON


def test_triton_is_looked_for_and_not_imported() -> None:
    assert (importlib.util.find_spec("triton") is not None) == HAS_TRITON
    code = "import sys, flatout.multiplex.kernels; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
