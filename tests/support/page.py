"""What a browser would see of a page, read by a parser."""

from __future__ import annotations

from html.parser import HTMLParser


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") for name, _ in attrs)
        self.names.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data
