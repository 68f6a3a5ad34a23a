"""Between prompts and token numbers, and back.

A task's stop texts end a completion.  A row stops early at any token whose own text holds one of them (for
"\\n" that is every token with a line break in it), and the text is cut at the first stop, however it was
tokenised.  A task of token numbers needs no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.engines.evolution.tasks.task import Prompt, text_of_ids
from flatout.errors import BadInput


class Texts:
    """Encodes the prompts of one task for one model and reads its completions."""

    def __init__(
        self, tokenizer: Any, *, stop: Sequence[str] = (), chat: bool | None = None, ends: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self._stop = tuple(stop)
        template = getattr(tokenizer, "chat_template", None)
        if chat and template is None:
            raise BadInput("the tokenizer has no chat template", hint="omit chat, or set it to false")
        self._chat = template is not None if chat is None else chat
        self.ends = tuple(sorted({*ends, *self._stopping_tokens()}))

    def ids(self, prompt: Prompt) -> tuple[int, ...]:
        """A prompt as the model reads it."""
        if prompt.token_ids is not None:
            return prompt.token_ids
        if self._chat:
            said = [{"role": "user", "content": prompt.text}]
            text = self.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return tuple(self.tokenizer.encode(prompt.text))

    def text(self, tokens: Sequence[int]) -> str:
        """A completion as the reward reads it."""
        if self.tokenizer is None:
            return text_of_ids(tokens)
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def _stopping_tokens(self) -> set[int]:
        if self.tokenizer is None:
            return set()
        own = self.tokenizer.eos_token_id
        found = set() if own is None else {own}
        if self._stop:
            texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
            found |= {token for token, text in enumerate(texts) if any(stop in text for stop in self._stop)}
        return found
