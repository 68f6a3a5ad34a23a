"""A task of the user's own: prompts of a file, with any columns beside them, and a reward.

One line is {"prompt": "...", ...}.  The reward gets the other columns as they stand: texts, numbers, lists.

    flatout evolve --model FOLDER --task sums.jsonl --task-option reward=my_rewards:near
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flatout.engines.evolution.rewards.kinds import PROMPT
from flatout.engines.evolution.rewards.make_reward import make_reward
from flatout.engines.evolution.tasks.jsonl import Fields, FileTask
from flatout.ground.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFile(FileTask):
    """Prompts of a file; `reward` is a name, a function, or several with weights (`make_reward`)."""

    template: str = "{prompt}"
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()

    name: ClassVar[str] = "prompts"
    fields: ClassVar[tuple[str, ...]] = (PROMPT,)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise BadInput(
                f"max_new_tokens={self.max_new_tokens} leaves no completion", hint="give 1 or more"
            )
        object.__setattr__(self, "path", Path(self.path))
        object.__setattr__(self, "heldout", None if self.heldout is None else Path(self.heldout))
        object.__setattr__(self, "stop", _texts(self.stop))
        object.__setattr__(self, "reward", make_reward(self.reward))
        FileTask.__post_init__(self)

    def answer(self, fields: Fields) -> Mapping[str, Any]:
        """Return every other column."""
        return {name: value for name, value in fields.items() if name != PROMPT}


def _texts(stop: Any) -> tuple[str, ...]:
    """Return a tuple of texts, from one text or several."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise BadInput(f"stop={stop!r} is not a list of texts", hint='write stop=["\\n"]')
    return texts
