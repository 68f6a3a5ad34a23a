"""English and German sentences from the message catalogues of two free packages.

A program that speaks several languages carries its sentences in compiled catalogues (.mo: a table of
originals and a table of translations).  Two packages give about two thousand pairs of real, short text.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from flatout.packages import DJANGO, JUPYTERLAB_GERMAN, fetch

PACKAGES = (JUPYTERLAB_GERMAN, DJANGO)
MAGIC = 0x950412DE
_LETTERS = re.compile(r"[^\W\d_]{2,}")


def german_pairs() -> list[tuple[str, str]]:
    """English and German, fetched into the user's cache on first use; NotFetched without a network."""
    pairs: dict[str, str] = {}
    for package in PACKAGES:
        for path in sorted(fetch(package).rglob("*.mo")):
            if {"de", "de_DE"} & set(path.parts):
                for original, translation in messages(path.read_bytes()):
                    pairs.setdefault(original, translation)
    return list(pairs.items())


def messages(catalogue: bytes) -> Iterator[tuple[str, str]]:
    """Sentence and translation of a compiled catalogue, plural forms one by one."""
    order = "<" if catalogue[:4] == struct.pack("<I", MAGIC) else ">"
    count, originals, translations = struct.unpack_from(f"{order}III", catalogue, 8)
    for number in range(count):
        original = _text(catalogue, originals + 8 * number, order).rpartition("\4")[2]  # after its context
        translation = _text(catalogue, translations + 8 * number, order)
        for one, other in zip(original.split("\0"), translation.split("\0"), strict=False):
            one, other = " ".join(one.split()), " ".join(other.split())
            if _LETTERS.search(one) and _LETTERS.search(other) and one != other:
                yield one, other


def _text(catalogue: bytes, entry: int, order: str) -> str:
    length, start = struct.unpack_from(f"{order}II", catalogue, entry)
    return catalogue[start : start + length].decode("utf-8")
