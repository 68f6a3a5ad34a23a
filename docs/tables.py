"""The tables of the pages, written into the files from the result files of the benchmarks.

    python docs/tables.py

A table stands between `<!-- OWNER: NAME -->` and `<!-- /OWNER -->`, so that it can be read in the repository.
`make tables` writes them all again; a test fails while one differs from what its result files say.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = {
    "adapters.md": "adapters_figures",
    "ceilings.md": "diagnosis_figures",
    "darkroom.md": "darkroom_figures",
    "memory.md": "memory_figures",
    "scale.md": "scale_figures",
    "scoreboard.md": "diagnosis_figures",
    "steering.md": "steering_figures",
    "tune.md": "tuning_figures",
    "watch.md": "watch_figures",
}

Tables = Mapping[str, Callable[[Path], str]]


def fill(markdown: str, tables: Tables, *, owner: str, folder: Path) -> str:
    """Put each table of `owner` behind its mark, in place of what stands there."""
    written = rf"(?:\n(?:(?!<!-- {owner}: ).)*?<!-- /{owner} -->)?"
    mark = re.compile(rf"<!-- {owner}: (\w+) -->{written}", re.DOTALL)

    def table(found: re.Match[str]) -> str:
        return f"<!-- {owner}: {found[1]} -->\n\n{tables[found[1]](folder)}\n\n<!-- /{owner} -->"

    return mark.sub(table, markdown)


def in_order(folder: Path, pattern: str) -> list[Path]:
    """List result files by age, as their names say it: they end in the date, or in the date and `-2`."""
    return sorted(folder.glob(pattern), key=lambda path: path.stem)


def current() -> dict[Path, str]:
    """Return what each page, and each picture of one, should hold."""
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    found: dict[Path, str] = {}
    for page, module in PAGES.items():
        figures = importlib.import_module(module)
        text = (DOCS / page).read_text(encoding="utf-8")
        found[DOCS / page] = figures.with_tables(text)
        if hasattr(figures, "pictures"):
            found |= {DOCS / path: picture for path, picture in figures.pictures().items()}
    return found


if __name__ == "__main__":
    for path, text in current().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
