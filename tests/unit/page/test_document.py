"""The document every page is: self-contained, whole, and coloured for light and dark."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from flatout.page.document import POLICY, document, write_page
from flatout.page.markup import escape, tag


def made(title: str = "a job") -> str:
    return document(title, [tag("p", "one"), None], footer=tag("footer", "end"), version="1.0")


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    page = made()
    assert escape(POLICY) in page and POLICY.startswith("default-src 'none'")
    assert "<script" not in page and "http:" not in page and "https:" not in page and "@import" not in page
    assert 'href="data:,"' in page


def test_parts_that_are_none_are_left_out_and_titles_are_text() -> None:
    page = made("<script>")
    assert "<title>&lt;script&gt;</title>" in page and "<main><p>one</p></main><footer>" in page


def test_every_colour_that_is_used_is_a_token_with_a_light_and_a_dark_side() -> None:
    tokens = resources.files("flatout.page").joinpath("tokens.css").read_text(encoding="utf-8")
    known = set(re.findall(r"--([\w-]+): light-dark\(#\w+, #\w+\);", tokens))
    used = set(re.findall(r"var\(--([\w-]+)[,)]", made())) - {"c", "amount"}  # set by the element itself
    assert len(known) > 20 and len(used) > 10 and used <= known


def test_a_page_is_written_whole(tmp_path: Path) -> None:
    write_page(made(), tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8") == made()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]
