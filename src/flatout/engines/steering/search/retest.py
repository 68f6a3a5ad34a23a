"""Whether the winner wins: fresh questions, paired intervals, and what steering costs elsewhere.

The best of fifty noisy trials is the luckiest as well as the best, so its score in the search says too much.
Winner and unsteered model are asked the same questions that the search never saw, and the interval is that of
the difference question by question: what makes a question hard hits both and cancels.

A resampled interval of few values is too narrow: it cannot leave their range, and it takes their spread for
the true one.  Of normal values a 95 % interval holds the true mean with the chance that Student's t with
n - 1 degrees of freedom stays below 1.96 sqrt((n - 1) / n): 0.5 of two values, 0.86 of six, 0.90 of ten.
Below ten there is a mean and no interval.

A strong vector also breaks the model's language.  The perplexity of neutral text, steered over unsteered,
says by how much: 1 is no harm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.engines.steering.report.record import Interval, Retest
from flatout.errors import BadInput

if TYPE_CHECKING:
    import numpy.typing as npt
    from numpy import float64

    Doubles = npt.NDArray[float64]

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95
FEWEST = 10  # values that an interval is made of


@dataclass(frozen=True, kw_only=True, slots=True)
class SideEffects:
    """Perplexity of neutral texts; `ratio` is steered over unsteered, its interval by resampling texts."""

    num_texts: int
    num_tokens: int
    unsteered: float
    steered: float
    ratio: Interval


def retest(steered: Sequence[float], unsteered: Sequence[float], *, seed: int = 0) -> Retest:
    """Values of the same questions, in the same order, with and without steering."""
    if len(steered) != len(unsteered) or not steered:
        raise BadInput(
            f"{len(steered)} steered and {len(unsteered)} unsteered values",
            hint="a paired difference needs both of every question, and at least 1 question",
        )
    import numpy as np

    treated, plain = np.asarray(steered, dtype=float), np.asarray(unsteered, dtype=float)
    if not (np.isfinite(treated).all() and np.isfinite(plain).all()):
        raise BadInput("a value is not finite", hint="a trial that gives no number has failed")
    chosen = np.random.default_rng(seed).integers(len(treated), size=(NUM_RESAMPLES, len(treated)))

    def mean(values: Doubles) -> Interval:
        return _interval(float(values.mean()), values[chosen].mean(1), num_values=len(values))

    return Retest(
        num_questions=len(treated),
        baseline=mean(plain),
        steered=mean(treated),
        difference=mean(treated - plain),
    )


def side_effects(
    steered: Sequence[tuple[float, int]], unsteered: Sequence[tuple[float, int]], *, seed: int = 0
) -> SideEffects:
    """From each text's (log-likelihood, tokens), with and without steering."""
    counts = [count for _, count in unsteered]
    if not counts or counts != [count for _, count in steered] or min(counts) < 1:
        raise BadInput(
            "neutral texts without tokens to predict", hint="give at least one text of two or more tokens"
        )
    import numpy as np

    tokens = np.asarray(counts, dtype=float)
    plain, treated = (np.asarray([value for value, _ in side]) for side in (unsteered, steered))
    chosen = np.random.default_rng(seed).integers(len(tokens), size=(NUM_RESAMPLES, len(tokens)))
    ratios = np.exp((plain - treated)[chosen].sum(1) / tokens[chosen].sum(1))
    total = float(tokens.sum())
    return SideEffects(
        num_texts=len(counts),
        num_tokens=int(total),
        unsteered=math.exp(-float(plain.sum()) / total),
        steered=math.exp(-float(treated.sum()) / total),
        ratio=_interval(math.exp(float((plain - treated).sum()) / total), ratios, num_values=len(counts)),
    )


def _interval(value: float, resampled: Doubles, *, num_values: int) -> Interval:
    import numpy as np

    if num_values < FEWEST:
        return Interval(value=value, low=None, high=None)
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value=value, low=float(low), high=float(high))
