"""Sentiment: is a sentence for or against?  A classification whose two labels are known.

A line is {"text": "...", "label": "positive"}; 0 and 1, "neg" and "pos" are understood.  A ZIP with one
member ending in .neg and one in .pos, a sentence per line, is read as it is.
"""

from __future__ import annotations

import random
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from flatout.engines.adapters.tasks.data_rows import Record, Splits
from flatout.engines.adapters.tasks.kinds.classification import Classification
from flatout.ground.errors import BadInput

LABELS = ("negative", "positive")
WRITTEN = {"0": 0, "1": 1, "neg": 0, "pos": 1, "negative": 0, "positive": 1}


@dataclass(frozen=True, kw_only=True)
class Sentiment(Classification):
    """Two labels for a text."""

    labels: tuple[str, ...] = field(default=LABELS, init=False)

    name: ClassVar[str] = "sentiment"
    from_rows: ClassVar[tuple[str, ...]] = ()

    def answers_of(self, row: Mapping[str, Any], record: Record) -> Record:
        given = str(row.get("label")).lower()
        if given not in WRITTEN:
            raise BadInput(f"'label' is {row.get('label')!r}", hint=f"known: {', '.join(WRITTEN)}")
        return {"label": LABELS[WRITTEN[given]]}

    def read(self, path: Path) -> list[Record]:
        return _read_zip(path) if path.suffix == ".zip" else super().read(path)

    def describe(self, splits: Splits) -> str | None:
        return None

    def generated_row(self, draw: random.Random) -> Record:
        is_good = draw.random() < 0.5
        kind, other = (_GOOD, _BAD) if is_good else (_BAD, _GOOD)
        one, two, third = draw.sample(_THINGS, 3)
        first, second = draw.sample(kind, 2)
        degree, last = draw.choice(_DEGREES), draw.choice(other)
        text = f"the {one} is {degree} {first} and the {two} is {second}, for all its {last} {third}."
        return {"text": text, "label": LABELS[is_good]}


def _read_zip(path: Path) -> list[Record]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {
                suffix: [name for name in archive.namelist() if name.endswith(suffix)]
                for suffix in (".neg", ".pos")
            }
            texts = {suffix: archive.read(names[0]) for suffix, names in members.items() if names}
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist", hint="check the path") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if len(texts) != 2:
        raise BadInput(
            f"{path} lacks a member ending in .neg or one in .pos", hint="give both, or a JSONL file"
        )
    return [
        {"text": line.strip(), "label": LABELS[WRITTEN[suffix.strip(".")]]}
        for suffix, text in texts.items()
        for line in _decoded(text).splitlines()
        if line.strip()
    ]


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return text.decode("latin-1")


# A generated world: adjectives that praise or blame, beside words that say nothing.
_GOOD = ("wonderful", "moving", "clever", "funny", "warm", "brilliant", "gentle", "honest", "lovely")
_BAD = ("dull", "clumsy", "boring", "silly", "cold", "hollow", "tedious", "noisy", "false", "ugly")
_THINGS = ("film", "story", "cast", "ending", "script", "music", "camera", "hero", "villain", "scene")
_DEGREES = ("rather", "quite", "truly", "deeply", "simply", "often", "mostly")
