"""Translation: a sentence in another language.

A line is {"source": "...", "target": "..."}.  Without a file the rows are English and German messages of two
free packages, from their compiled catalogues (.mo: a table of originals and a table of translations).
`gettext` of the standard library reads them too, but keeps only the singular of a plural's two originals.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from flatout.engines.adapters.tasks.data_rows import Record
from flatout.engines.adapters.tasks.generation import GenerationTask
from flatout.engines.adapters.tasks.metrics import bleu
from flatout.ground.packages import DJANGO, JUPYTERLAB_GERMAN, fetch

PACKAGES = (JUPYTERLAB_GERMAN, DJANGO)
MAGIC = 0x950412DE
_LETTERS = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True, kw_only=True)
class Translation(GenerationTask):
    """A sentence for a sentence, scored by BLEU."""

    name: ClassVar[str] = "translation"
    inputs: ClassVar[tuple[str, ...]] = ("source",)
    answers: ClassVar[tuple[str, ...]] = ("target",)

    def text_scores(self, said: Sequence[str], records: Sequence[Record]) -> dict[str, float]:
        return {"bleu": bleu(said, [record["target"] for record in records])}

    def real(self) -> tuple[list[Record], str]:
        records = [{"source": source, "target": target} for source, target in german_pairs()]
        return records, f"German catalogues of {' and '.join(package.name for package in PACKAGES)}"

    def generated_row(self, draw: random.Random) -> Record:
        pairs = [draw.choice(list(table.items())) for table in (_WHO, _DOES, _HOW, _WHAT, _WHERE)]
        return {"source": " ".join(word for word, _ in pairs), "target": " ".join(word for _, word in pairs)}


def german_pairs() -> list[tuple[str, str]]:
    """Return English and German pairs, fetched once into the user's cache; NotFetched without a network."""
    pairs: dict[str, str] = {}
    for package in PACKAGES:
        for path in sorted(fetch(package).rglob("*.mo")):
            if {"de", "de_DE"} & set(path.parts):
                for original, translation in messages(path.read_bytes()):
                    pairs.setdefault(original, translation)
    return list(pairs.items())


def messages(catalogue: bytes) -> Iterator[tuple[str, str]]:
    """Yield sentence and translation of a compiled catalogue, plural forms one by one."""
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


# A generated world: one word for one word, in the same order.
_WHO = {"the man": "der mann", "the woman": "die frau", "the child": "das kind", "the dog": "der hund"}
_WHO |= {"the king": "der könig", "the cat": "die katze", "the girl": "das mädchen", "the thief": "der dieb"}
_DOES = {"sees": "sieht", "hears": "hört", "finds": "findet", "paints": "malt", "loves": "liebt"}
_DOES |= {"buys": "kauft", "sells": "verkauft", "seeks": "sucht"}
_HOW = {"today": "heute", "often": "oft", "here": "hier", "slowly": "langsam", "again": "wieder"}
_WHAT = {"a house": "ein haus", "a book": "ein buch", "a boat": "ein boot", "a horse": "ein pferd"}
_WHAT |= {"a picture": "ein bild", "a knife": "ein messer", "a sheep": "ein schaf", "a shirt": "ein hemd"}
_WHERE = {"in spring": "im frühling", "in town": "in der stadt", "at night": "bei nacht", "by sea": "am meer"}
