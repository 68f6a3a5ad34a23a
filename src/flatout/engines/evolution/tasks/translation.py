"""Translation, scored by BLEU against a reference.

One line is {"source": "...", "target": "..."}.  The first line of a completion is compared: a translation of
one sentence has no second one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from flatout.engines.evolution.rewards.bleu import Bleu
from flatout.engines.evolution.rewards.kinds import Reward
from flatout.engines.evolution.tasks.jsonl import Fields, FileTask


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceTranslation(FileTask):
    """Sentences of a file."""

    template: str = "Translate.\nSource: {source}\nTranslation:"
    max_new_tokens: int = 96
    reward: Reward = field(default_factory=partial(Bleu, first_line=True))

    name: ClassVar[str] = "translation"
    fields: ClassVar[tuple[str, ...]] = ("source", "target")
    stop: ClassVar[tuple[str, ...]] = ("\n",)

    def answer(self, fields: Fields) -> dict[str, str]:
        """Return the reference."""
        return {"target": fields["target"]}
