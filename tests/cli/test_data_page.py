"""The page on the data path is executed, from top to bottom in one process, as a reader would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def test_the_snippets_run(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 6
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "host (computed" in done.stdout and "0 (measured" in done.stdout
