"""The documentation can be read: its colours have contrast, its code fits, its front page shows a picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LOWEST = 4.5
ON_PAGE = ("default-fg-color", "default-fg-color--light", "typeset-a-color", "accent-fg-color")


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_every_text_has_contrast(repository: Path, scheme: str) -> None:
    style = (repository / "docs" / "theme" / "flatout.css").read_text(encoding="utf-8")
    block = re.search(rf'\[data-md-color-scheme="{scheme}"\] {{(.*?)}}', style, flags=re.DOTALL)
    assert block is not None
    colours = dict(re.findall(r"--md-([\w-]+): (#[0-9a-f]{3,6});", block[1]))
    pairs = [(name, "default-bg-color") for name in ON_PAGE]
    pairs += [(name, "code-bg-color") for name in colours if name.startswith(("code-hl-", "code-fg"))]
    pairs += [("primary-bg-color", "primary-fg-color")]
    assert len(pairs) >= 18
    low = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: round(value, 2) for pair, value in low.items() if value < LOWEST} == {}


def test_the_front_page_has_a_command_and_a_picture_and_code_may_wrap(repository: Path) -> None:
    docs = repository / "docs"
    front = (docs / "index.md").read_text(encoding="utf-8")
    assert "flatout diagnose train.py" in front.partition("```bash")[2].partition("```")[0]
    [picture] = re.findall(r"!\[[^]]+\]\(([^)]+)\)", front)
    assert (docs / picture).is_file()
    assert "white-space: pre-wrap" in (docs / "theme" / "flatout.css").read_text(encoding="utf-8")
    assert "theme/flatout.css" in (repository / "mkdocs.yml").read_text(encoding="utf-8")
