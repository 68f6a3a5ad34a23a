"""Texts as token numbers, each distinct one once.

Two texts with equal tokens have equal activations, so a pass computes each distinct sequence once.  The two
sides of a pair differ in their answer only: what they have in common is counted in tokens, after tokenising
each whole text, because a tokenizer may join the end of a prompt with the start of an answer.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from flatout.engines.steering.questions import Pair
from flatout.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Distinct sequences, which of them each text is, and the pairs among them."""

    sequences: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]  # of each sequence, to name it in an error
    row_of: tuple[int, ...]  # text -> sequence
    pairs: tuple[tuple[int, int], ...]  # sequences that share a prompt

    def keys(self) -> tuple[bytes, ...]:
        """A digest of each sequence's tokens."""
        return tuple(hashlib.sha256(array("q", tokens).tobytes()).digest() for tokens in self.sequences)


def encode(texts: Sequence[str] | Sequence[Pair], *, tokenizer: Any) -> Encoded:
    """Texts, or the positive texts of all pairs followed by their negative ones, as token numbers."""
    if not texts:
        raise BadInput("there are no texts to extract activations of")
    pairs = [one for one in texts if isinstance(one, Pair)]
    plain = [one for one in texts if isinstance(one, str)]
    if len(pairs) not in (0, len(texts)) or len(pairs) + len(plain) != len(texts):
        raise BadInput("texts are all strings or all pairs")
    if pairs:
        plain = [pair.prompt + pair.positive for pair in pairs]
        plain += [pair.prompt + pair.negative for pair in pairs]
    sequences: dict[tuple[int, ...], int] = {}
    named: list[str] = []
    row_of: list[int] = []
    for tokens, text in zip(_token_numbers(plain, tokenizer), plain, strict=True):
        if not tokens:
            raise BadInput(f"text {len(row_of)} has no tokens: {text!r}")
        if tokens not in sequences:
            sequences[tokens] = len(named)
            named.append(text)
        row_of.append(sequences[tokens])
    half = len(pairs)
    return Encoded(
        sequences=tuple(sequences),
        texts=tuple(named),
        row_of=tuple(row_of),
        pairs=tuple(zip(row_of[:half], row_of[half:], strict=True)) if half else (),
    )


def common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that two sequences begin with alike."""
    alike = takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False))
    return sum(1 for _ in alike)


def _token_numbers(texts: Sequence[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """Each text tokenised on its own; one that a chat template began keeps the one start token it has."""
    start: str | None = getattr(tokenizer, "bos_token", None)
    begun = [start is not None and text.startswith(start) for text in texts]
    found: list[tuple[int, ...]] = [()] * len(texts)
    for special in (True, False):
        places = [place for place, has_start in enumerate(begun) if has_start != special]
        if not places:
            continue
        chosen = [texts[place] for place in places]
        # No mask, and no padding: what the tokenizer is set to pad with cannot matter.
        rows = tokenizer(chosen, add_special_tokens=special, padding=False, return_attention_mask=False)
        for place, row in zip(places, rows["input_ids"], strict=True):
            found[place] = tuple(row)
    return found
