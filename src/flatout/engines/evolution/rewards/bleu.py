"""Sentence BLEU of many completions at once.

BLEU compares the n-grams (runs of 1 to 4 words) of a text with those of a reference.  In a population every
prompt is answered by hundreds of members, so one reference meets hundreds of completions, and counting
n-grams in Python dictionaries, as a score per sentence does, is where the time goes.  Here sacrebleu splits
the texts into words and everything after that is arrays: words become numbers, an n-gram becomes the number
of the pair (n-gram one shorter, next word), and all rows are counted by sorting.  The results are those of
`sacrebleu.sentence_bleu` (a test holds that), as a share: 1.0 is a perfect match.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.engines.evolution.rewards.kinds import AnsweredRow, expected_text
from flatout.ground.errors import BadInput, import_extra

MAX_ORDER = 4
Longs = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bleu:
    """Sentence BLEU against a text of the answer, from 0 to 1, smoothed as sacrebleu does by default."""

    field: str | None = None  # None: the only one, or target
    tokenize: str = "13a"
    lowercase: bool = False
    first_line: bool = False  # of a completion: compare nothing else

    def __post_init__(self) -> None:
        _metric(self.tokenize, self.lowercase)

    def check_answer(self, answer: Mapping[str, str]) -> None:
        """Raise BadInput if the answer has no text to compare with."""
        self._reference(answer)

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        metric = _metric(self.tokenize, self.lowercase)
        return float(metric.sentence_score(self._said(completion), [self._reference(answer)]).score) / 100

    def score_rows(self, rows: list[AnsweredRow]) -> list[float]:
        """Score many rows, each as a single call would."""
        pairs = [(self._said(completion), self._reference(answer)) for completion, answer in rows]
        # Early populations repeat themselves: what was said twice is scored once.
        place_of = {pair: place for place, pair in enumerate(dict.fromkeys(pairs))}
        shares = self._shares(list(place_of))
        return [float(shares[place_of[pair]]) for pair in pairs]

    def _said(self, completion: str) -> str:
        return completion.strip().partition("\n")[0] if self.first_line else completion

    def _reference(self, answer: Mapping[str, str]) -> str:
        return expected_text(answer, self.field, usual="target")

    def _shares(self, pairs: list[tuple[str, str]]) -> NDArray[np.float64]:
        references = {text: place for place, text in enumerate(dict.fromkeys(ref for _, ref in pairs))}
        vocabulary: dict[str, int] = {}
        given = self._numbered([completion for completion, _ in pairs], vocabulary)
        expected = self._numbered(list(references), vocabulary)
        reference_of_row = np.array([references[ref] for _, ref in pairs], dtype=np.int64)
        correct = _matches(given, expected, reference_of_row)
        lengths, reference_lengths = _lengths(given), _lengths(expected)[reference_of_row]
        return _scores(correct, lengths, reference_lengths)

    def _numbered(self, texts: Sequence[str], vocabulary: dict[str, int]) -> list[list[int]]:
        tokenizer = _metric(self.tokenize, self.lowercase).tokenizer
        if self.lowercase:
            texts = [text.lower() for text in texts]
        return [
            [vocabulary.setdefault(word, len(vocabulary)) for word in tokenizer(text.rstrip()).split()]
            for text in texts
        ]


@functools.cache
def _metric(tokenize: str, lowercase: bool) -> Any:
    metrics = import_extra("sacrebleu.metrics", extra="evolution")
    if tokenize not in metrics.BLEU.TOKENIZERS:
        known = ", ".join(sorted(metrics.BLEU.TOKENIZERS))
        raise BadInput(f"sacrebleu has no tokenizer {tokenize!r}", hint=f"known: {known}")
    try:
        return metrics.BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=True)
    except RuntimeError as error:  # a tokenizer whose own package is not installed
        raise BadInput(
            f"the tokenizer {tokenize!r} cannot be used: {' '.join(str(error).split())}"
        ) from error


def _lengths(texts: Sequence[Sequence[int]]) -> Longs:
    return np.array([len(text) for text in texts], dtype=np.int64)


def _matches(given: list[list[int]], expected: list[list[int]], reference_of_row: Longs) -> Longs:
    """Return [rows, MAX_ORDER]: how many n-grams of each row its reference has."""
    texts = [*given, *expected]
    words = np.fromiter(itertools.chain.from_iterable(texts), dtype=np.int64)
    text_of_word = np.repeat(np.arange(len(texts)), _lengths(texts))
    num_words = int(words.max(initial=0)) + 1
    correct = np.zeros((len(given), MAX_ORDER), dtype=np.int64)
    grams, starts = words, np.arange(len(words))
    for order in range(MAX_ORDER):
        if order:
            # An n-gram goes on where the next word belongs to the same text.
            longer = starts + order < len(words)
            longer[longer] = text_of_word[starts[longer] + order] == text_of_word[starts[longer]]
            starts = starts[longer]
            pairs = grams[longer] * num_words + words[starts + order]
            # Numbering the pairs anew keeps them small: a product of such numbers never overflows.
            grams = np.unique(pairs, return_inverse=True)[1]
        is_given = text_of_word[starts] < len(given)
        rows, references = text_of_word[starts[is_given]], text_of_word[starts[~is_given]] - len(given)
        correct[:, order] = _clipped(
            rows, grams[is_given], references, grams[~is_given], reference_of_row=reference_of_row
        )
    return correct


def _clipped(
    rows: Longs, grams: Longs, references: Longs, reference_grams: Longs, *, reference_of_row: Longs
) -> Longs:
    """Count matches per row; an n-gram counts at most as often as its reference has it."""
    num_rows = len(reference_of_row)
    size = int(max(grams.max(initial=0), reference_grams.max(initial=0))) + 1
    known, known_counts = np.unique(references * size + reference_grams, return_counts=True)
    if not len(known):
        return np.zeros(num_rows, dtype=np.int64)
    said, counts = np.unique(rows * size + grams, return_counts=True)
    row_of, gram_of = said // size, said % size
    wanted = reference_of_row[row_of] * size + gram_of
    place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    found = np.where(known[place] == wanted, np.minimum(counts, known_counts[place]), 0)
    return np.bincount(row_of, weights=found, minlength=num_rows).astype(np.int64)


def _scores(correct: Longs, lengths: Longs, reference_lengths: Longs) -> NDArray[np.float64]:
    """Compute BLEU from its counts: smoothed, over the orders that a text is long enough for."""
    totals = np.maximum(lengths[:, None] - np.arange(MAX_ORDER), 0)
    zero = (totals > 0) & (correct == 0)
    # The k-th order without a match counts as half of the one before it: 1/2, 1/4, ... of an n-gram.
    smoothed = np.where(zero, 0.5 ** np.cumsum(zero, axis=1), correct)
    logs = np.log(smoothed, where=totals > 0, out=np.zeros(totals.shape)) - np.log(np.maximum(totals, 1))
    orders = np.maximum((totals > 0).sum(axis=1), 1)
    too_short = np.minimum(1 - reference_lengths / np.maximum(lengths, 1), 0)
    scores = np.exp(too_short + logs.sum(axis=1) / orders)
    return np.asarray(np.where(correct.any(axis=1), scores, 0.0))
