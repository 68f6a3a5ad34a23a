"""Whether a treatment pays, and whether its numbers are right.

**Time.**  Trials of two arms alternate, and the ratio of each pair is one value: what differs from process to
process is in it.  The interval is Student's t over the logarithms of the ratios.  A treatment is kept when
the lower end lies above 1.03; one whose upper end lies below is dropped; others get more pairs.

**Numbers.**  Exact treatments have the gradients and losses of the job, bit for bit.  Reordered ones are
compared at the first step with a run in 64 bits: an error of a parameter's gradient or change may be twice
that of the job itself.  Then their losses must stay as near to the job's as those of a job whose weights were
changed in the last bit: rounding does that much.  Lossy ones are compared by the losses of paired seeds.
What could not be compared has not passed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from flatout.tuner.trial.meter import TrialResult

LEAST_GAIN = 1.03
FEWEST_PAIRS, MOST_PAIRS = 3, 6
MARGIN = 0.002  # of the loss, for lossy treatments
ERROR_FACTOR = 2.0  # of the job's own error against 64 bits
ERROR_FLOOR = 1e-6  # relative: below it both are exact for our purposes
ENVELOPE_FACTOR = 10.0
ENVELOPE_FLOOR = 1e-5  # of the loss
LAST_SHARE = 0.25  # of the losses, which a lossy treatment is judged by
# Student's t, two-sided 95 %, by degrees of freedom; and one-sided.
T_TWO = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 11: 2.201}
T_ONE = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833, 11: 1.796}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How many times faster one arm is than the other, with its 95 % interval."""

    ratio: float
    low: float
    high: float
    num_pairs: int
    best: float  # of the pairs

    @property
    def is_kept(self) -> bool:
        return self.num_pairs >= FEWEST_PAIRS and self.low > LEAST_GAIN

    @property
    def is_none(self) -> bool:
        """Whether it gains too little: to drop a treatment takes less proof than to keep it."""
        return self.num_pairs >= 2 and (self.high < LEAST_GAIN or self.best < LEAST_GAIN)

    @property
    def is_settled(self) -> bool:
        return self.is_kept or self.is_none


def gain_of(pairs: Sequence[tuple[TrialResult, TrialResult]]) -> Gain:
    """Compare pairs of (plain, treated) trials."""
    ratios = [math.log(median(plain.blocks_s) / median(treated.blocks_s)) for plain, treated in pairs]
    middle, best = fmean(ratios), math.exp(max(ratios))
    if len(ratios) < 2:
        return Gain(ratio=math.exp(middle), low=0.0, high=math.inf, num_pairs=len(ratios), best=best)
    half = _quantile(T_TWO, len(ratios) - 1) * stdev(ratios) / math.sqrt(len(ratios))
    return Gain(
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        num_pairs=len(ratios),
        best=best,
    )


def _quantile(table: dict[int, float], freedom: int) -> float:
    return table[max(known for known in table if known <= freedom)]


def failure(trial: TrialResult, *, like: TrialResult | None = None) -> str | None:
    """Why a trial cannot be judged; None where it can."""
    if trial.ended == "crashed":
        return f"the script raised {trial.error}"
    if trial.ended == "killed":
        return f"the script {trial.error}"
    if trial.ended == "finished":
        return f"the script ended after {trial.num_steps} steps, before it could be measured"
    if not trial.losses:
        return "no loss was seen: nothing was verified"
    if not all(map(math.isfinite, trial.losses)):
        return "a loss is not finite"
    if like is not None and trial.still > like.still:
        return f"{trial.still - like.still} parameters are no longer changed by a step"
    if like is not None and len(trial.losses) != len(like.losses):
        return "the number of losses per step changed"
    return None


def is_reproducible(one: TrialResult, other: TrialResult) -> bool:
    """Whether two runs of the same arm computed the same, bit for bit."""
    return one.losses == other.losses and one.sums == other.sums


def differs_exactly(plain: TrialResult, treated: TrialResult, *, reproducible: bool) -> str | None:
    """Why an exact treatment is not exact; None where it is."""
    if not reproducible:
        if plain.sums.get("1") == treated.sums.get("1"):
            return None
        return "the job differs from run to run, and the treatment already at its first gradients"
    for number, (one, other) in enumerate(zip(plain.losses, treated.losses, strict=True)):
        if one != other:
            return f"loss {number + 1} is {other:.7g} instead of {one:.7g}"
    for step, sums in plain.sums.items():
        if treated.sums.get(step) != sums:
            return f"the gradients of step {step} differ"
    return None


def differs_by_more_than_rounding(plain: Path, treated: Path, exact: Path) -> str | None:
    """Compare gradients and changes of the first step with those in 64 bits; the reason where they differ."""
    from safetensors.torch import load_file

    ours, theirs, right = (load_file(path) for path in (plain, treated, exact))
    if not right or ours.keys() != theirs.keys() or ours.keys() != right.keys():
        return "the first step has other parameters than in 64 bits: nothing was verified"
    for name, reference in right.items():
        size = float(reference.norm())
        own, other = (float((each[name] - reference).norm()) for each in (ours, theirs))
        if not math.isfinite(other) or other > ERROR_FACTOR * own + ERROR_FLOOR * size:
            what, _, number = name.partition(".")
            return (
                f"the {what} of parameter {number} is {other / max(size, 1e-300):.2g} off,"
                f" the job's own {own / max(size, 1e-300):.2g}"
            )
    return None


def leaves_the_envelope(
    plain: TrialResult, treated: TrialResult, nudged: Sequence[TrialResult]
) -> str | None:
    """Where losses are further from the job's than rounding takes them; None where they are not."""
    widest = 0.0
    for number, (one, other) in enumerate(zip(plain.losses, treated.losses, strict=False)):
        widest = max(
            widest, *(abs(each.losses[number] - one) for each in nudged if number < len(each.losses))
        )
        allowed = ENVELOPE_FACTOR * widest + ENVELOPE_FLOOR * abs(one)
        if abs(other - one) > allowed:
            return f"loss {number + 1} is {other:.6g} instead of {one:.6g}; rounding explains {allowed:.2g}"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossChange:
    """The change of the late losses over paired seeds, as a share of the loss."""

    mean: float
    high: float  # one-sided 95 %
    num_seeds: int

    def __str__(self) -> str:
        return f"late losses change by {self.mean:+.2%}, at most {self.high:+.2%}"

    @property
    def is_inside(self) -> bool:
        return self.high < MARGIN


def loss_change(pairs: Sequence[tuple[TrialResult, TrialResult]]) -> LossChange:
    """Compare the late losses of (plain, treated) runs of the same seeds; larger is worse."""
    changes = []
    for plain, treated in pairs:
        one, other = _late_loss(plain), _late_loss(treated)
        changes.append((other - one) / max(abs(one), 1e-12))
    spread = stdev(changes) if len(changes) > 1 else math.inf
    half = _quantile(T_ONE, max(1, len(changes) - 1)) * spread / math.sqrt(len(changes))
    return LossChange(mean=fmean(changes), high=fmean(changes) + half, num_seeds=len(changes))


def _late_loss(trial: TrialResult) -> float:
    late = max(1, round(LAST_SHARE * len(trial.losses)))
    return fmean(trial.losses[-late:])
