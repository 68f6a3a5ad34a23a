"""Translation, scored by BLEU against a reference.

One line is {"source": "...", "target": "..."}.  The first line of a completion is compared: a translation of
one sentence has no second one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from flatout.engines.evolution.rewards.bleu import Bleu
from flatout.engines.evolution.rewards.rewards import Reward, Row
from flatout.engines.evolution.tasks.jsonl import check_template, filled, key_of, read_splits
from flatout.engines.evolution.tasks.splits import ordered_prompts
from flatout.engines.evolution.tasks.task import Prompt, Split

FIELDS = ("source", "target")


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstLineBleu:
    """BLEU of the first line of a completion."""

    bleu: Bleu = field(default_factory=Bleu)

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        return self.bleu(_first_line(completion), answer)

    def score_rows(self, rows: list[Row]) -> list[float]:
        """The scores of many rows, each as a call would give it."""
        return self.bleu.score_rows([(_first_line(completion), answer) for completion, answer in rows])


def _first_line(completion: str) -> str:
    return completion.strip().partition("\n")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """Sentences from `path`; held out are those of a second file, or some of the first."""

    path: Path
    heldout: Path | None = None
    template: str = "Translate.\nSource: {source}\nTranslation:"
    max_new_tokens: int = 96
    reward: Reward = field(default_factory=FirstLineBleu)
    _train: tuple[Prompt, ...] = field(init=False, repr=False, compare=False)
    _heldout: tuple[Prompt, ...] = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "translation"
    stop: ClassVar[tuple[str, ...]] = ("\n",)

    def __post_init__(self) -> None:
        check_template(self.template, field="source")
        train, heldout = read_splits(self.path, self.heldout, names=FIELDS, make=self._prompt)
        object.__setattr__(self, "_train", train)
        object.__setattr__(self, "_heldout", heldout)

    def _prompt(self, fields: dict[str, str]) -> Prompt:
        return Prompt(
            text=filled(self.template, field="source", value=fields["source"]),
            answer={"target": fields["target"]},
            key=f"translation {key_of(fields['source'])}",
        )

    def prompts(self, split: Split, *, epoch: int, count: int, seed: int) -> list[Prompt]:
        """See `Task.prompts`."""
        given = self._train if split == "train" else self._heldout
        return ordered_prompts(given, split=split, epoch=epoch, count=count, seed=seed)
