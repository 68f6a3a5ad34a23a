"""Translation, scored by BLEU against a reference.

One line is {"source": "...", "target": "..."}.  The first line of a completion is compared: a translation of
one sentence has no second one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flatout.engines.evolution.rewards.bleu import Bleu
from flatout.engines.evolution.rewards.kinds import Reward, Row
from flatout.engines.evolution.tasks.jsonl import Fields, FileTask


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstLineBleu:
    """BLEU of the first line of a completion."""

    bleu: Bleu = field(default_factory=Bleu)

    def check_answer(self, answer: Mapping[str, Any]) -> None:
        """See `RewardOfAnswers`."""
        self.bleu.check_answer(answer)

    def __call__(self, completion: str, answer: Mapping[str, Any], /) -> float:
        return self.bleu(_first_line(completion), answer)

    def score_rows(self, rows: list[Row]) -> list[float]:
        """The scores of many rows, each as a call would give it."""
        return self.bleu.score_rows([(_first_line(completion), answer) for completion, answer in rows])


def _first_line(completion: str) -> str:
    return completion.strip().partition("\n")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceTranslation(FileTask):
    """Sentences of a file."""

    template: str = "Translate.\nSource: {source}\nTranslation:"
    max_new_tokens: int = 96
    reward: Reward = field(default_factory=FirstLineBleu)

    name: ClassVar[str] = "translation"
    fields: ClassVar[tuple[str, ...]] = ("source", "target")
    stop: ClassVar[tuple[str, ...]] = ("\n",)

    def answer(self, fields: Fields) -> dict[str, str]:
        """The reference."""
        return {"target": fields["target"]}
