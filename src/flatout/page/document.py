"""One HTML file that needs nothing else: no host, no font, no script.

It is read in a browser years later, on a phone, or on paper.  A content security policy forbids the page
to load or run anything, so even a defect in escaping could not turn a job's file name into code.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from flatout.atomic_files import write_whole
from flatout.page.markup import Html, tag

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, parts: Iterable[Html | None], *, footer: Html, version: str) -> str:
    """The whole page, without the `parts` that are None."""
    room = resources.files("flatout.page")
    style = "\n".join(room.joinpath(name).read_text(encoding="utf-8") for name in ("tokens.css", "page.css"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"flatout {version}"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(style)),
    )
    body = tag("body", tag("main", *(part for part in parts if part is not None)), footer)
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def write_page(page: str, path: Path) -> None:
    """Write a page whole or not at all: a browser never opens half of one."""
    write_whole(path, page.encode())
