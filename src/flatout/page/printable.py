"""Text that came from a job, made safe for a terminal and for a page.

A file name, a label or a prompt may hold anything: codes that colour or clear a terminal, marks that reverse
the reading order of what follows, halves of characters.  Everything of that kind is replaced, so that what a
reader sees is what is there.
"""

from __future__ import annotations

import unicodedata

_REVERSING = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_BROKEN = ("Cc", "Cs")  # control codes, halves of surrogate pairs


def printable(text: str, *, keep: str = "") -> str:
    """Replace line breaks by spaces and harmful characters by �; characters in `keep` stay."""
    return "".join(char if char in keep else _harmless(char) for char in text)


def _harmless(char: str) -> str:
    if char in "\t\n\r":
        return " "
    return "\ufffd" if char in _REVERSING or unicodedata.category(char) in _BROKEN else char


def shorten(text: str, longest: int) -> str:
    """Cut a text that is longer than `longest` characters, and mark the cut."""
    return text if len(text) <= longest else text[:longest] + " …"
