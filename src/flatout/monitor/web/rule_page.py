"""A rule of the doctor as a small page, for the links of a verdict."""

from __future__ import annotations

import re

from flatout.doctor.rule import Rule
from flatout.page.markup import Html, join, tag

FENCE = re.compile(r"^```\w*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def rule_page(rule: Rule) -> str:
    """Write the whole document; it lies one folder below the page of the runs."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="../static/icon.svg"),
        tag("link", rel="stylesheet", href="../static/page.css"),
        tag("script", src="../static/theme.js"),
        tag("title", f"{rule.code} {rule.name}"),
    )
    back = tag("p", tag("a", "the runs", href="../"))
    title = tag("h1", tag("span", rule.code), " ", rule.name)
    parts = [tag("section", tag("h2", name), *_blocks(text)) for name, text in rule.sections.items()]
    body = tag("body", tag("main", back, title, *parts, class_="rule"))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _blocks(text: str) -> list[Html]:
    """Render paragraphs and fenced code; a rule's text has nothing else."""
    pieces = FENCE.split(text)  # prose, code, prose, code, …
    blocks: list[Html] = []
    for position, piece in enumerate(pieces):
        if position % 2:
            # Lines are escaped one by one: `markup` makes spaces of the line breaks within a text.
            lines = (join([line]) for line in piece.rstrip("\n").split("\n"))
            blocks.append(tag("pre", tag("code", Html("\n".join(lines)))))
        else:
            blocks += [tag("p", *_inline(part)) for part in re.split(r"\n\s*\n", piece.strip()) if part]
    return blocks


def _inline(paragraph: str) -> list[str]:
    pieces = paragraph.split("`")
    return [tag("code", piece) if position % 2 else piece for position, piece in enumerate(pieces)]
