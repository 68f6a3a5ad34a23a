"""One HTML file that needs nothing else: no host, no font, no script.

It is read in a browser years later, on a phone, or on paper.  A content security policy forbids the page
to load or run anything, so even a defect in escaping could not turn a job's file name into code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from flatout.ground.atomic_files import write_whole
from flatout.page.markup import NOTHING, Html, facts, tag

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(
    name: str,
    parts: Iterable[Html | None],
    *,
    kind: str,
    where: Sequence[str | None],
    verdict: str,
    figures: Iterable[tuple[str, str | None]],
    footer: Iterable[tuple[str, str | None]],
    version: str,
    heading: Html | None = None,
    below_name: Html = NOTHING,
    warning: str | None = None,
) -> str:
    """Make the whole page: a name, its verdict, its figures, then the parts that are not None."""
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
        tag("title", f"flatout: {name}"),
        tag("style", Html(style)),
    )
    masthead = tag(
        "header",
        tag("p", kind, class_="kicker"),
        tag("h1", heading or name),
        below_name,
        tag("p", " · ".join(word for word in where if word), class_="where"),
        tag("p", verdict, class_="verdict"),
        tag("p", warning, class_="warning") if warning else NOTHING,
        facts(figures, kind="figures"),
    )
    main = tag("main", masthead, *(part for part in parts if part is not None))
    body = tag("body", main, tag("footer", facts(footer)))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def write_page(page: str, path: Path) -> None:
    """Write a page whole or not at all: a browser never opens half of one."""
    write_whole(path, page.encode())
