"""Speed-ups with their uncertainty, from interleaved blocks of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.measure.evidence import Arm, Counterfactual, Spread, Step

if TYPE_CHECKING:
    from typing import Literal

NUM_RESAMPLES = 2000
OUTLIER_FACTOR = 3.0


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
    steps: Sequence[Step], *, name: Literal["cached", "half"], baseline: Arm
) -> Counterfactual | None:
    """The counterfactual `name` against `baseline`, block i of one paired with block i of the other.

    The interval resamples rounds and, within a round, steps: what changes slowly on a shared machine
    hits both arms of a round and cancels.
    """
    treated, plain = _kept_blocks(steps, name), _kept_blocks(steps, baseline)
    if len(plain) > len(treated):
        # the baseline also has blocks from before the rounds; the latest ones are the paired ones
        plain = plain[len(plain) - len(treated) :]
    treated = treated[: len(plain)]
    if len(treated) < 2:
        return None
    import numpy as np

    random = np.random.default_rng(0)
    treated_s = float(np.mean([np.mean(block) for block in treated]))
    plain_s = float(np.mean([np.mean(block) for block in plain]))
    ratios = np.empty(NUM_RESAMPLES)
    for i in range(NUM_RESAMPLES):
        rounds = random.integers(len(treated), size=len(treated))
        upper = sum(random.choice(plain[r], size=len(plain[r])).mean() for r in rounds)
        lower = sum(random.choice(treated[r], size=len(treated[r])).mean() for r in rounds)
        ratios[i] = upper / lower
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Counterfactual(
        name=name,
        baseline=baseline,
        step_s=treated_s,
        baseline_step_s=plain_s,
        speedup=plain_s / treated_s,
        speedup_low=min(float(low), plain_s / treated_s),
        speedup_high=max(float(high), plain_s / treated_s),
        num_blocks=len(treated),
        num_steps=sum(len(block) for block in treated),
    )


def _kept_blocks(steps: Sequence[Step], arm: str) -> list[list[float]]:
    blocks: dict[int, list[float]] = {}
    for step in steps:
        if step.arm == arm and step.kept:
            blocks.setdefault(step.block, []).append(step.step_s)
    return [blocks[block] for block in sorted(blocks)]


def outliers(steps: Sequence[Step]) -> set[int]:
    """Indices of steps that hold something else: an evaluation, a checkpoint, a hiccup of the machine.

    They show as time outside the loader far above what steps of the same arm take.  Waits are judged
    by nobody: loaders with several workers wait in bursts, and those count.
    """
    import numpy as np

    found: set[int] = set()
    for arm in {step.arm for step in steps}:
        of_arm = [step for step in steps if step.arm == arm]
        if len(of_arm) < 4:
            continue
        work_s = np.array([step.step_s - step.phases_s.get("wait", 0.0) for step in of_arm])
        usual_s = float(np.median(work_s))
        found |= {
            step.index for step, s in zip(of_arm, work_s, strict=True) if s > OUTLIER_FACTOR * usual_s > 0
        }
    return found
