"""The room's names, and that reading a task needs no torch."""

from __future__ import annotations

import subprocess
import sys

from flatout.engines.evolution import tasks


def test_names_are_there() -> None:
    assert tasks.__all__ and all(hasattr(tasks, name) for name in tasks.__all__)


def test_a_task_needs_no_torch() -> None:
    code = (
        "import sys; from flatout.engines.evolution.tasks import find_task;"
        "find_task('countdown').prompts('train', epoch=0, count=2, seed=0);"
        "from flatout.engines.evolution.rewards import pool; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
