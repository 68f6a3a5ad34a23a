"""Scores of predictions against references, in points from 0 to 100.

Each says how similar two texts are, and they differ in what they ignore.  Accuracy and macro F1 compare
labels; macro F1 gives every label the same weight, however rare it is.  For numbers, Pearson's correlation
asks whether they lie on a line with the true ones, Spearman's whether they have the same order, and R²
whether they are the true ones; these three can be below 0.  Exact match and span F1 are SQuAD's: articles,
case and punctuation do not count, and F1 gives credit for the words that overlap.  ROUGE counts the words
(1), pairs (2) or the longest common subsequence (L) that two texts share; BLEU the runs of up to four words,
over all texts at once.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from flatout.ground.errors import import_extra

Words = Sequence[str]
Order = Literal["1", "2", "L"]
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def mean(values: Sequence[float]) -> float:
    """Return the mean in points; 0 for an empty list."""
    return 100 * sum(values) / len(values) if values else 0.0


def accuracy(predicted: Sequence[str], expected: Sequence[str]) -> float:
    return mean([float(one == other) for one, other in zip(predicted, expected, strict=True)])


def macro_f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Return the mean of the F1 of each label that is predicted or expected."""
    return mean(
        [each / 100 for each in label_f1(predicted, expected, labels={*predicted, *expected}).values()]
    )


def label_f1(predicted: Sequence[str], expected: Sequence[str], *, labels: Iterable[str]) -> dict[str, float]:
    """Return the F1 of each label; 0 for one that is neither predicted nor expected."""
    pairs = Counter(zip(predicted, expected, strict=True))
    said, true = Counter(predicted), Counter(expected)
    return {
        label: 200 * pairs[label, label] / max(said[label] + true[label], 1) for label in sorted(set(labels))
    }


def pearson(predicted: Sequence[float], expected: Sequence[float]) -> float:
    """Return the correlation in points, from -100 to 100; 0 if one side is constant."""
    said, true = (np.asarray(values, dtype=np.float64) for values in (predicted, expected))
    if not len(said):
        return 0.0
    said, true = said - said.mean(), true - true.mean()
    scale = float(np.sqrt((said @ said) * (true @ true)))
    return 100 * float(said @ true) / scale if scale else 0.0


def spearman(predicted: Sequence[float], expected: Sequence[float]) -> float:
    """Return the correlation of ranks, in points; equal numbers share their mean rank."""
    return pearson(_ranks(predicted), _ranks(expected))


def explained_variance(predicted: Sequence[float], expected: Sequence[float]) -> float:
    """Return the share of the variance that the predictions explain (R²), in points."""
    said, true = (np.asarray(values, dtype=np.float64) for values in (predicted, expected))
    if not len(true) or not (spread := float(np.square(true - true.mean()).sum())):
        return 0.0
    return 100 * (1 - float(np.square(said - true).sum()) / spread)


def _ranks(values: Sequence[float]) -> list[float]:
    _, places, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((2 * last - counts + 1) / 2)[places].tolist()  # type: ignore[no-any-return]


def plain_answer(text: str) -> str:
    """Strip from an answer what SQuAD does not count: case, punctuation, articles, spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: Sequence[str], expected: Sequence[str]) -> float:
    return accuracy([plain_answer(text) for text in predicted], [plain_answer(text) for text in expected])


def span_f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Return the mean F1 of the words of each pair of answers."""
    pairs = zip(predicted, expected, strict=True)
    return mean([_f1(plain_answer(one).split(), plain_answer(other).split()) for one, other in pairs])


def _f1(predicted: Words, expected: Words) -> float:
    if not predicted or not expected:
        return float(predicted == expected)
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected))


def words_of(text: str) -> list[str]:
    """Split a text into runs of letters and digits, in lower case: what ROUGE compares."""
    return re.findall(r"[^\W_]+", text.lower())


def rouge(predicted: Sequence[str], expected: Sequence[Sequence[str]], *, order: Order) -> float:
    """Return the mean F1 of each text against its most similar reference."""
    scores = []
    for text, references in zip(predicted, expected, strict=True):
        words = words_of(text)
        scores.append(max(_rouge_of(words, words_of(reference), order=order) for reference in references))
    return mean(scores)


def _rouge_of(words: Words, reference: Words, *, order: Order) -> float:
    if order == "L":
        shared, total = longest_common(words, reference), len(words) + len(reference)
    else:
        said, wanted = _grams(words, int(order)), _grams(reference, int(order))
        shared, total = (said & wanted).total(), said.total() + wanted.total()
    return 2 * shared / total if total else 0.0


def _grams(words: Words, order: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[start:] for start in range(order)), strict=False))


def longest_common(one: Words, other: Words) -> int:
    """Return the length of the longest common subsequence."""
    best = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for place, candidate in enumerate(other, start=1):
            above = best[place]
            best[place] = diagonal + 1 if word == candidate else max(above, best[place - 1])
            diagonal = above
    return best[-1]


def pieces_of(text: str) -> list[str]:
    """Split a text into runs of letters, numbers and single signs, without case and accents.

    An encoder whose vocabulary has no case, accents or spaces can still write all of these.
    """
    signs = unicodedata.normalize("NFD", text.lower())
    bare = "".join(sign for sign in signs if not unicodedata.combining(sign))
    return re.findall(r"[^\W\d_]+|\d+|[^\w\s]|_", bare)


def bleu(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Return the corpus BLEU of `pieces_of` the texts."""
    if not predicted:
        return 0.0
    metric = import_extra("sacrebleu.metrics", extra="adapters").BLEU(tokenize="none")
    said, wanted = ([" ".join(pieces_of(text)) for text in texts] for texts in (predicted, expected))
    return float(metric.corpus_score(said, [wanted]).score)
