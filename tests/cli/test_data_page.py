"""The page on the data path is executed, from top to bottom in one process, as a reader would."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.warm_python import warm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def test_the_snippets_run(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 6
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    done = warm().run("python", "-W", "error", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "host (computed" in done.stdout and "0 (measured" in done.stdout
