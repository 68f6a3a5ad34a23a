"""Whole-number arithmetic of batches: what keeps an effective batch exactly, and what comes nearest.

The effective batch (batch × accumulation × ranks) is part of the objective.  Keeping it exactly means that
the batch must divide it.  A prime effective batch has no divisor worth using: then the nearest effective
batches that do have one are offered, and the choice is the user's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# A divisor below this share of what fits leaves so much of the device idle that it is no answer.
SENSIBLE_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A batch, its accumulation and the effective batch they make on `ranks` processes."""

    batch_size: int
    accumulation: int
    effective_batch: int

    def __str__(self) -> str:
        return f"{self.effective_batch} ({self.batch_size} × {self.accumulation})"


def divisors(number: int) -> list[int]:
    """All divisors, largest first."""
    low = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    high = [number // i for i in low if i * i != number]
    return [*high, *reversed(low)]


def largest_divisor(number: int, *, at_most: int) -> int | None:
    return next((divisor for divisor in divisors(number) if divisor <= at_most), None)


def is_sensible(batch_size: int, *, largest: int) -> bool:
    return batch_size >= largest * SENSIBLE_SHARE


def nearest_choices(effective: int, *, largest: int, ranks: int) -> tuple[Choice, ...]:
    """Effective batches around `effective` with a sensible divisor: below, above, and the fullest batch."""
    per_rank = effective // ranks
    # Every multiple of `largest` qualifies, so a walk of `largest` steps to either side must end.
    below = _first(range(per_rank - 1, max(per_rank - largest, 0) - 1, -1), largest=largest)
    above = _first(range(per_rank + 1, per_rank + largest + 1), largest=largest)
    fullest = (largest, max(1, round(per_rank / largest)))
    found = dict.fromkeys(pair for pair in (below, above, fullest) if pair is not None)
    return tuple(
        Choice(batch_size=batch, accumulation=steps, effective_batch=batch * steps * ranks)
        for batch, steps in found
        if batch * steps != per_rank
    )


def _first(numbers: range, *, largest: int) -> tuple[int, int] | None:
    for number in numbers:
        divisor = largest_divisor(number, at_most=largest) if number > 0 else None
        if divisor is not None and 2 * divisor >= min(largest, number):
            return divisor, number // divisor
    return None


def learning_rate_rule(before: int, after: int, *, learning_rate: float | None) -> str:
    """What is usually done to the learning rate when the effective batch changes; stated, never applied."""
    ratio = after / before
    change = f"the effective batch goes from {before} to {after} (×{ratio:.3g})"
    if learning_rate is None:
        factors = (
            f"×{ratio:.3g} by the linear rule (SGD), ×{math.sqrt(ratio):.3g} by the square-root rule (Adam)"
        )
        return f"{change}; the learning rate is left alone: {factors}"
    linear, root = learning_rate * ratio, learning_rate * math.sqrt(ratio)
    return (
        f"{change}; the learning rate {learning_rate:g} is left alone: the linear rule (SGD) would give "
        f"{linear:.3g}, the square-root rule (Adam) {root:.3g}"
    )
