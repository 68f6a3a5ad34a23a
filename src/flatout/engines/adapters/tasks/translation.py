"""Translation: a sentence in one language in, the same in another out.

A line is {"source": "...", "target": "..."}.  Without a file the rows are English and German messages from
the catalogues of two free packages.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flatout.engines.adapters.tasks.catalogues import PACKAGES, german_pairs
from flatout.engines.adapters.tasks.generation import GenerationTask
from flatout.engines.adapters.tasks.metrics import bleu
from flatout.engines.adapters.tasks.task import Record


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

    def generated(self, count: int, *, seed: int) -> list[Record]:
        draw = random.Random(f"translation {seed}")
        return [_sentence(draw) for _ in range(count)]


# A generated world: one word for one word, in the same order.
_WHO = {"the man": "der mann", "the woman": "die frau", "the child": "das kind", "the dog": "der hund"}
_WHO |= {"the king": "der könig", "the cat": "die katze", "the girl": "das mädchen", "the thief": "der dieb"}
_DOES = {"sees": "sieht", "hears": "hört", "finds": "findet", "paints": "malt", "loves": "liebt"}
_DOES |= {"buys": "kauft", "sells": "verkauft", "seeks": "sucht"}
_HOW = {"today": "heute", "often": "oft", "here": "hier", "slowly": "langsam", "again": "wieder"}
_WHAT = {"a house": "ein haus", "a book": "ein buch", "a boat": "ein boot", "a horse": "ein pferd"}
_WHAT |= {"a picture": "ein bild", "a knife": "ein messer", "a sheep": "ein schaf", "a shirt": "ein hemd"}
_WHERE = {"in spring": "im frühling", "in town": "in der stadt", "at night": "bei nacht", "by sea": "am meer"}


def _sentence(draw: random.Random) -> Record:
    pairs = [draw.choice(list(table.items())) for table in (_WHO, _DOES, _HOW, _WHAT, _WHERE)]
    return {"source": " ".join(word for word, _ in pairs), "target": " ".join(word for _, word in pairs)}
