"""Texts as token numbers, each distinct one once.

Two texts with equal tokens have equal activations, so a pass computes each distinct sequence once.  The two
sides of a pair differ in their answer only: what they have in common is counted in tokens, after tokenising
each whole text, because a tokenizer may join the end of a prompt with the start of an answer.

A GPU computes a small model's activations about as fast as its texts are tokenised.  So texts are encoded
window by window: a thread tokenises the next ones while the device works.  While that thread runs Python no
kernel is launched, so the tokenizer's own threads are asked directly, a text's tokens become one array, and
the thread stays a few windows ahead: it works while the launching one waits for the device.

Texts that are extracted more than once, at other positions or of other models with the same tokenizer, can be
tokenised before: `extract` takes what `encode` gives, and the pass has nothing to wait for.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.engines.steering.questions import Question
from flatout.ground.errors import BadInput, import_extra

Tokens = npt.NDArray[np.int64]
AHEAD = 4  # windows that are tokenised before they are asked for: two batches or so
# Where a tokenizer may do more with a text than its backend does.
CALLS = ("__call__", "_encode_plus", "_batch_encode_plus", "set_truncation_and_padding")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Distinct sequences, which of them each text is, and the pairs among them."""

    sequences: tuple[Tokens, ...]
    keys: tuple[bytes, ...]  # a digest of each sequence's tokens
    texts: tuple[str, ...]  # of each sequence, to name it in an error
    row_of: tuple[int, ...]  # text -> sequence
    pairs: tuple[tuple[int, int], ...]  # sequences that share a prompt

    def tokens(self) -> list[tuple[int, ...]]:
        """Return the tokens of each text."""
        return [tuple(self.sequences[row].tolist()) for row in self.row_of]

    @property
    def num_sides(self) -> int:
        """2 for pairs, whose positive texts all come first; else 1."""
        return 2 if self.pairs else 1

    @property
    def num_given(self) -> int:
        """Count the texts or pairs that were encoded."""
        return len(self.row_of) // self.num_sides

    def windows(self, window_tokens: int | None) -> Iterator[tuple[Sequence[int], Encoded]]:
        """Yield the places of some texts or pairs, and these alone, as `encode_ahead` does."""
        count = self.num_given
        sides = [self.row_of[side * count : (side + 1) * count] for side in range(self.num_sides)]
        rows = list(zip(*sides, strict=True))
        sizes = list(map(len, self.sequences))
        lengths = [sum(sizes[row] for row in one) for one in rows]
        windows = _cut_windows(lengths, rows, limit=window_tokens)
        for places in windows:
            yield places, self if len(windows) == 1 else self._some([rows[place] for place in places])

    def _some(self, wanted: Sequence[tuple[int, ...]]) -> Encoded:
        """Return the texts or pairs of these sequences."""
        distinct = dict.fromkeys(row for one in wanted for row in one)
        numbers = {row: number for number, row in enumerate(distinct)}
        return Encoded(
            sequences=tuple(self.sequences[row] for row in numbers),
            keys=tuple(self.keys[row] for row in numbers),
            texts=tuple(self.texts[row] for row in numbers),
            row_of=tuple(numbers[one[side]] for side in range(self.num_sides) for one in wanted),
            pairs=tuple((numbers[first], numbers[second]) for first, second in wanted) if self.pairs else (),
        )


def encode_ahead(
    texts: Sequence[str] | Sequence[Question], *, tokenizer: Any, window_characters: int | None
) -> Iterator[tuple[Sequence[int], Encoded]]:
    """Yield windows of texts or pairs: the places of some, and these encoded; a thread tokenises the next.

    The shortest texts come first, a quarter of a window and then a half of one: they start the work, and show
    at once what is wrong with them.  Equal texts lie in one window.
    """
    _check(texts)
    whole = [one if isinstance(one, str) else one.prompt + one.positive + one.negative for one in texts]
    windows = _cut_windows(list(map(len, whole)), whole, limit=window_characters)

    def encode_window(window: Sequence[int]) -> Encoded:
        some: Any = [texts[place] for place in window]
        return encode(some, tokenizer=tokenizer, places=window)

    if len(windows) == 1:
        yield windows[0], encode_window(windows[0])
        return
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flatout-tokenizing")
    try:
        ahead = deque(thread.submit(encode_window, window) for window in windows[:AHEAD])
        for number, window in enumerate(windows):
            encoded = ahead.popleft().result()
            if number + AHEAD < len(windows):
                ahead.append(thread.submit(encode_window, windows[number + AHEAD]))
            yield window, encoded
    finally:
        thread.shutdown(cancel_futures=True)


def encode(
    texts: Sequence[str] | Sequence[Question], *, tokenizer: Any, places: Sequence[int] | None = None
) -> Encoded:
    """Encode texts, or the positive texts of all pairs followed by their negative ones.

    `places` are the numbers of the texts among all, to name one in an error.
    """
    _check(texts)
    pairs = [one for one in texts if isinstance(one, Question)]
    plain = [one for one in texts if isinstance(one, str)]
    if pairs:
        plain = [pair.prompt + pair.positive for pair in pairs]
        plain += [pair.prompt + pair.negative for pair in pairs]
    numbers: dict[bytes, int] = {}
    sequences: list[Tokens] = []
    named: list[str] = []
    row_of: list[int] = []
    for tokens, text in zip(_tokenize(plain, tokenizer), plain, strict=True):
        if not len(tokens):
            number = len(row_of) % len(texts)
            raise BadInput(f"text {places[number] if places else number} has no tokens: {text!r}")
        key = hashlib.sha256(tokens.data).digest()
        if key not in numbers:
            numbers[key] = len(sequences)
            sequences.append(tokens)
            named.append(text)
        row_of.append(numbers[key])
    half = len(pairs)
    return Encoded(
        sequences=tuple(sequences),
        keys=tuple(numbers),
        texts=tuple(named),
        row_of=tuple(row_of),
        pairs=tuple(zip(row_of[:half], row_of[half:], strict=True)) if half else (),
    )


def common_tokens(first: Tokens | Sequence[int], second: Tokens | Sequence[int]) -> int:
    """Count the tokens that two sequences begin with alike."""
    shorter = min(len(first), len(second))
    differing = np.flatnonzero(np.not_equal(first[:shorter], second[:shorter]))
    return int(differing[0]) if differing.size else shorter


def _check(texts: Sequence[str] | Sequence[Question]) -> None:
    if not texts:
        raise BadInput("there are no texts to extract activations from", hint="give at least one")
    if not any(all(issubclass(one, kind) for one in set(map(type, texts))) for kind in (str, Question)):
        raise BadInput("texts must be all strings or all pairs")


def _cut_windows(
    lengths: Sequence[int], texts: Sequence[Hashable], *, limit: int | None
) -> list[Sequence[int]]:
    """Cut texts, by their places, into windows of similar lengths that sum to about `limit`; one if None."""
    if limit is None or sum(lengths) <= limit:
        return [range(len(texts))]
    first: dict[Hashable, int] = {}  # equal texts stand together: by the place of the first of them
    keys = [
        length * len(texts) + first.setdefault(text, place)
        for place, (length, text) in enumerate(zip(lengths, texts, strict=True))
    ]
    order = sorted(range(len(texts)), key=keys.__getitem__)
    windows: list[Sequence[int]] = []
    start = 0
    while start < len(order):
        room = max(1, limit // (4 >> min(len(windows), 2)))  # a quarter, a half, and then whole ones
        end, taken = start, 0
        # Never between equal texts.
        while end < len(order) and (taken < room or texts[order[end]] == texts[order[end - 1]]):
            taken += lengths[order[end]]
            end += 1
        windows.append(order[start:end])
        start = end
    return windows


def _tokenize(texts: Sequence[str], tokenizer: Any) -> list[Tokens]:
    """Tokenise each text on its own; one that a chat template began keeps the one start token it has."""
    start: str | None = getattr(tokenizer, "bos_token", None)
    begun = [start is not None and text.startswith(start) for text in texts]
    found: list[Tokens] = [np.empty(0, dtype=np.int64)] * len(texts)
    for special in (True, False):
        places = [place for place, has_start in enumerate(begun) if has_start != special]
        if not places:
            continue
        rows = _call_tokenizer([texts[place] for place in places], tokenizer, special=special)
        for place, row in zip(places, rows, strict=True):
            found[place] = np.array(row, dtype=np.int64)
    return found


def _call_tokenizer(texts: list[str], tokenizer: Any, *, special: bool) -> list[list[int]]:
    """Call the tokenizer, or its backend where the tokenizer's own call adds nothing."""
    transformers: Any = import_extra("transformers", extra="steering")
    plain, kind = transformers.PreTrainedTokenizerFast, type(tokenizer)
    directly = isinstance(tokenizer, plain) and all(
        getattr(kind, name, None) is getattr(plain, name, None) for name in CALLS
    )
    # No mask, and no padding: what the tokenizer is set to pad with cannot matter.
    called = tokenizer(
        texts[:1] if directly else texts,
        add_special_tokens=special,
        padding=False,
        return_attention_mask=False,
    )
    if not directly:
        return list(called["input_ids"])
    # The call has set the backend up, for the first text and so for all.
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=special)
    return [encoding.ids for encoding in encodings]
