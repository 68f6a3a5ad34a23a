"""Speed-ups with their uncertainty, from interleaved blocks of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from flatout.measure.evidence import Counterfactual, Spread, Step

if TYPE_CHECKING:
    import numpy.typing as npt
    from numpy import float64, int64
    from numpy.random import Generator

    Doubles = npt.NDArray[float64]
    Longs = npt.NDArray[int64]

NUM_RESAMPLES = 2000
OUTLIER_FACTOR = 3.0
FEWEST_STEPS = 4  # to know what is usual
MOST_OUTLIERS = 0.25  # of all timed steps
UNKNOWN_CHANCE = 0.3  # of a round, if too few blocks were seen to tell; typical of a shared machine
AS_IF_SEEN = 2  # blocks that differ by this chance, beside a single one that was seen
# by degrees of freedom, from 1 on; the last entry for any more
STUDENT_95 = (12.7, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.2, 2.18, 2.16, 2.14, 2.13, 2.0)
FARTHEST = 2  # blocks: anything farther away ran at another time


def typical_steps(steps_s: Sequence[float]) -> list[int]:
    """Return the indices of the steps that are not far longer than the others."""
    if len(steps_s) < FEWEST_STEPS:
        return list(range(len(steps_s)))
    longest_s = OUTLIER_FACTOR * median(steps_s)
    return [number for number, step_s in enumerate(steps_s) if step_s <= longest_s]


def bootstrap_interval(
    statistic: Callable[[Longs], Doubles],
    *,
    num_values: int,
    num_drawn: int | None = None,
    num_resamples: int = NUM_RESAMPLES,
    random: Generator | None = None,
) -> tuple[float, float]:
    """Return the 95 % interval of a statistic of `num_values` values, by resampling them with replacement.

    `statistic` gets the indices of the drawn values, [resamples, drawn], and returns one number per resample.
    """
    import numpy as np

    random = random or np.random.default_rng(0)
    drawn = random.integers(num_values, size=(num_resamples, num_drawn or num_values))
    low, high = np.percentile(statistic(drawn), [2.5, 97.5])
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of `values`, by resampling."""
    import numpy as np

    known = np.asarray(values)
    return bootstrap_interval(lambda drawn: known[drawn].mean(axis=1), num_values=len(known))


def spread(values_s: Sequence[float]) -> Spread | None:
    if not values_s:
        return None
    import numpy as np

    values = np.asarray(values_s)
    return Spread(
        num=len(values),
        mean_s=float(values.mean()),
        median_s=float(np.median(values)),
        p95_s=float(np.percentile(values, 95)),
        max_s=float(values.max()),
    )


def compare(
    steps: Sequence[Step], *, label: str, baseline: str, kind: str | None = None
) -> Counterfactual | None:
    """Compare the arm `label` with `baseline`, pairing each of its blocks with the baseline blocks beside it.

    The interval resamples rounds and, within a round, steps: slow changes on a shared machine hit both arms
    of a round and cancel.  A few rounds are too few to show how much blocks differ by chance, so the interval
    is at least as wide as Student's t makes it from the differences between rounds and between baseline
    blocks.
    """
    treated_blocks, plain_blocks = _kept_blocks(steps, label), _kept_blocks(steps, baseline)
    pairs = [(values, _beside(block, plain_blocks)) for block, values in sorted(treated_blocks.items())]
    paired = [(values, beside) for values, beside in pairs if beside]
    if not paired:
        return None
    import numpy as np

    treated = [np.array(values) for values, _ in paired]
    plain = [np.array(beside) for _, beside in paired]
    treated_s = float(np.mean([block.mean() for block in treated]))
    plain_s = float(np.mean([block.mean() for block in plain]))
    random = np.random.default_rng(0)
    low, high = bootstrap_interval(
        lambda rounds: _resampled_sums(plain, rounds, random) / _resampled_sums(treated, rounds, random),
        num_values=len(paired),
        random=random,
    )
    speedup = plain_s / treated_s
    ratios = [math.log(beside.mean() / block.mean()) for block, beside in zip(treated, plain, strict=True)]
    chance = math.exp(_chance(ratios, plain_blocks) / math.sqrt(len(paired)))
    return Counterfactual(
        kind=kind or label,
        label=label,
        baseline=baseline,
        step_s=treated_s,
        baseline_step_s=plain_s,
        speedup=speedup,
        speedup_low=min(low, speedup / chance),
        speedup_high=max(high, speedup * chance),
        num_blocks=len(treated),
        num_steps=sum(len(block) for block in treated),
    )


def _chance(ratios: Sequence[float], blocks: dict[int, list[float]]) -> float:
    """Return how far a round's ratio lies from the true one by chance: 95 % of it, as a logarithm.

    Each baseline block is compared with the two around it, so that a machine that gets slower does not count;
    if these are too few, the differences between the rounds themselves, `ratios`, count too, and then what is
    typical.
    """
    import numpy as np

    means = np.log([np.mean(blocks[block]) for block in sorted(blocks)])
    apart = means[1:-1] - (means[:-2] + means[2:]) / 2
    squares, num_free = np.sum(apart**2), len(apart)
    if num_free < 2:
        squares += np.sum((np.array(ratios) - np.mean(ratios)) ** 2)
        num_free += len(ratios) - 1
    if num_free < 1:
        return UNKNOWN_CHANCE
    chance = _student(squares, num_free)
    if num_free < AS_IF_SEEN:  # a single difference says little: the interval would be as good as endless
        typical = (UNKNOWN_CHANCE / STUDENT_95[AS_IF_SEEN - 1]) ** 2
        chance = min(chance, _student(squares + AS_IF_SEEN * typical, num_free + AS_IF_SEEN))
    return chance


def _student(squares: float, num_free: int) -> float:
    return float(STUDENT_95[min(num_free, len(STUDENT_95)) - 1] * math.sqrt(squares / num_free))


def _beside(block: int, plain_blocks: dict[int, list[float]]) -> list[float]:
    """Return the baseline steps nearest to a block: right before and after it, else one block farther."""
    for distance in range(1, FARTHEST + 1):
        found = [plain_blocks.get(block - distance, []), plain_blocks.get(block + distance, [])]
        if any(found):
            return [step_s for values in found for step_s in values]
    return []


def _resampled_sums(blocks: list[Doubles], rounds: Longs, random: Generator) -> Doubles:
    """Return, for each row of `rounds`, the sum of block means, every block resampled with replacement."""
    import numpy as np

    means = np.empty(rounds.shape)
    for number, block in enumerate(blocks):
        drawn = rounds == number
        means[drawn] = random.choice(block, size=(int(drawn.sum()), len(block))).mean(axis=1)
    return np.asarray(means.sum(axis=1))


def _kept_blocks(steps: Sequence[Step], arm: str) -> dict[int, list[float]]:
    blocks: dict[int, list[float]] = {}
    for step in steps:
        if step.arm == arm and step.kept:
            blocks.setdefault(step.block, []).append(step.step_s)
    return blocks


def outliers(steps: Sequence[Step]) -> set[int]:
    """Return the indices of steps that hold something else: an evaluation, a checkpoint, a machine hiccup.

    Their time outside the loader is far above that of the faster steps of the same arm.  Waits are not
    judged: loaders with several workers wait in bursts, and those count.  If many steps are slow, that is how
    this machine runs: excluding them from one arm and not from another would create a difference out of
    nothing.
    """
    import numpy as np

    found: set[int] = set()
    for arm in {step.arm for step in steps}:
        of_arm = [step for step in steps if step.arm == arm]
        if len(of_arm) < 4:
            continue
        work_s = np.array([step.step_s - step.phases_s.get("wait", 0.0) for step in of_arm])
        usual_s = float(np.percentile(work_s, 25))
        found |= {
            step.index for step, s in zip(of_arm, work_s, strict=True) if s > OUTLIER_FACTOR * usual_s > 0
        }
    return found if len(found) <= MOST_OUTLIERS * len(steps) else set()
