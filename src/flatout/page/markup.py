"""HTML and SVG put together from elements, so that text from a job can never become markup.

    tag("td", name, class_="name")      name is escaped, whatever it holds
    tag("tr", tag("td", "a"))           elements are kept as they are

A string is text unless `tag` made it; there is no way to forget to escape.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from flatout.ground.units import show
from flatout.page.printable import printable

Value = TypeVar("Value")

VOID = frozenset({"meta", "link", "br", "hr"})


class Html(str):
    """Text that is HTML already; only `tag` and `join` make it."""

    __slots__ = ()


NOTHING = Html()


def tag(name: str, /, *children: str, **attributes: str | int | float | None) -> Html:
    """Make one element; `class_` and `stroke_width` become class and stroke-width; None is left out."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Html:
    """Join elements; escape the plain strings among them."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))


def escape(text: str) -> str:
    return html.escape(printable(text), quote=True)


def _number(value: str | int | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def section(title: str, *children: str, note: str = "", anchor: str | None = None) -> Html:
    """Make a part of a page; the `note` below says how to read it."""
    below = (tag("p", note, class_="note"),) if note else ()
    return tag("section", tag("h2", title), *children, *below, id=anchor)


def listing(title: str, items: Iterable[str]) -> Html | None:
    """Make a section with a list; None if the list is empty."""
    shown = [tag("li", item) for item in items]
    return section(title, tag("ul", *shown)) if shown else None


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> Html:
    """Make a table that scrolls inside itself, `numbers` set right; without rows, nothing."""

    def cells(name: str, row: Sequence[str]) -> list[Html]:
        return [tag(name, cell, class_="number" if i in numbers else None) for i, cell in enumerate(row)]

    body = [tag("tr", *cells("td", row)) for row in rows]
    if not body:
        return NOTHING
    whole = tag("table", tag("thead", tag("tr", *cells("th", heads))), tag("tbody", *body))
    return tag("div", whole, class_="scroll")


def facts(pairs: Iterable[tuple[str, str | None]], *, kind: str = "facts") -> Html:
    """Make a list of names and values side by side; a value that is None is left out."""
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value is not None]
    return tag("dl", *shown, class_=kind)


def known(value: Value | None, show: Callable[[Value], str]) -> str | None:
    """Show a value as text; None if it is unknown, so that `facts` leave it out."""
    return None if value is None else show(value)


def code(text: object) -> Html:
    """Set a place or a name in the type of source code; n/a if there is none."""
    return tag("code", show(text))
