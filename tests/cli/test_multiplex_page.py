"""The page on variants is executed from top to bottom in one process, and names every family that is read."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.warm_python import warm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "multiplex.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def test_the_snippets_run(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 5
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    done = warm().run("python", "-W", "error", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "eager (assumed" in done.stdout


def test_the_table_names_every_family() -> None:
    from flatout.multiplex.models.families import FAMILIES

    names = {
        "llama": "Llama",
        "qwen2": "Qwen 2",
        "qwen3": "Qwen 3",
        "gemma": "Gemma",
        "gemma2": "Gemma 2",
        "gemma3_text": "Gemma 3",
        "gpt2": "GPT-2",
        "gpt_neox": "GPT-NeoX",
    }
    assert set(names) == set(FAMILIES)
    table = PAGE.read_text(encoding="utf-8").partition("## Families")[2].partition("## Modes")[0]
    assert not [name for name in names.values() if name not in table]
