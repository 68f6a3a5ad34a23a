"""The document every page is: self-contained, whole, and coloured for light and dark."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

from flatout.page.document import POLICY, document, write_page
from flatout.page.markup import escape, tag


def made(name: str = "a job", **options: Any) -> str:
    return document(
        name,
        [tag("p", "one"), None],
        kind="Report",
        where=("here", None, "now"),
        verdict="It works.",
        figures=[("step", "1 s"), ("loss", None)],
        footer=[("run", "a")],
        version="1.0",
        **options,
    )


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    page = made()
    assert escape(POLICY) in page and POLICY.startswith("default-src 'none'")
    assert "<script" not in page and "http:" not in page and "https:" not in page and "@import" not in page
    assert 'href="data:,"' in page


def test_parts_that_are_none_are_left_out_and_titles_are_text() -> None:
    page = made("<script>")
    assert "<title>flatout: &lt;script&gt;</title>" in page and "<h1>&lt;script&gt;</h1>" in page
    assert "</header><p>one</p></main><footer>" in page
    assert '<p class="where">here · now</p>' in page and "loss" not in page.partition("<body>")[2]


def test_a_warning_and_a_command_stand_in_the_masthead() -> None:
    page = made(warning="It crashed.", below_name=tag("p", "train.py"), heading=tag("code", "a"))
    assert '<p class="warning">It crashed.</p>' in page
    assert "<h1><code>a</code></h1><p>train.py</p>" in page


def test_every_colour_that_is_used_is_a_token_with_a_light_and_a_dark_side() -> None:
    tokens = resources.files("flatout.page").joinpath("tokens.css").read_text(encoding="utf-8")
    known = set(re.findall(r"--([\w-]+): light-dark\(#\w+, #\w+\);", tokens))
    used = set(re.findall(r"var\(--([\w-]+)[,)]", made())) - {"c", "amount"}  # set by the element itself
    assert len(known) > 20 and len(used) > 10 and used <= known


def test_a_page_is_written_whole(tmp_path: Path) -> None:
    write_page(made(), tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8") == made()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]
