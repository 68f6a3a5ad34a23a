"""Whether a treatment pays, and whether its numbers are right.

**Time.**  Trials of two arms alternate, and the ratio of each pair is one value, which includes the
differences between processes.  The interval is Student's t over the logarithms of the ratios; few pairs may
agree by chance, so their spread counts as at least that of the job against itself.  A treatment is kept if
the lower end lies above 1.03 and dropped if the upper end lies below; others get more pairs.  Two pairs are
enough to keep it if the lower end, which is far from the middle then, lies above 1.3.  A treatment that can
be switched gets its interval from blocks of one run.  Everything kept together gets more pairs until its
interval is narrow: it is what the user is told.

**Numbers.**  Exact treatments have the batches, losses, gradients and parameters of the job, bit for bit.
Reordered ones are compared at the first step, from the same weights and batch, with a run in 64 bits: the
error of a parameter's gradient or change may be twice that of the job itself, three times in half precision.
Then their losses must stay as near to the job's as those of a job whose weights were changed in the last bit:
rounding does that much.  Lossy ones are compared by the length of the first step and by the losses of paired
seeds, with margins fixed in advance.  What could not be compared has not passed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev

from flatout.measure.arms.arm import Same
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trial.switched import LEAST_GAIN as LEAST_GAIN
from flatout.tuner.trial.switched import ArmResult

FEWEST_PAIRS, MOST_PAIRS = 3, 6
CLEAR_PAIRS, CLEAR_GAIN = 2, 1.3  # two pairs are enough if even their wide interval shows this much
PRECISE = 1.1  # a gain is told with an interval that reaches no further from it
MARGIN = 0.002  # of the loss, for lossy treatments
STEP_MARGIN = 0.02  # of the length of the first step, also for lossy treatments
ERROR_FACTOR, HALF_ERROR_FACTOR = 2.0, 3.0  # times the job's own error against 64 bits
HALF = ("float16", "bfloat16")
SAME_LOSS = 0.02  # of the first loss: how far a run in 64 bits may differ from the job
ERROR_FLOOR = 1e-6  # relative: below it both count as exact
CHANGE_FLOOR = 1e-5  # the same for a step: Adam divides gradients by their size, those near zero too
DROPOUT_FACTOR = 10.0  # times ERROR_FLOOR: a larger effect on a loss shows dropout
DROPS_LESS_ERRORS, EARLY_SHARE = 3.0, 0.25  # standard errors; and of the losses
ENVELOPE_FACTOR = 10.0
ENVELOPE_FLOOR = 1e-5  # of the loss, and of the norm of a weight
OTHERS_DIFFER = "weights that no optimizer changes, such as an average, differ"
LAST_SHARE = 0.25  # of the losses, to judge a lossy treatment by
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
        is_clear = self.num_pairs >= CLEAR_PAIRS and self.low > CLEAR_GAIN
        return is_clear or (self.num_pairs >= FEWEST_PAIRS and self.low > LEAST_GAIN)

    @property
    def is_none(self) -> bool:
        """Whether it gains too little: dropping a treatment takes less proof than keeping it."""
        return self.num_pairs >= 2 and (self.high < LEAST_GAIN or self.best < LEAST_GAIN)

    def why_none(self, what: str) -> str:
        """Say why the gain is too little; `what` was compared, blocks or pairs."""
        least = f"{LEAST_GAIN - 1:.0%}".replace("%", " %")
        if self.high < LEAST_GAIN:
            return f"it gains less than {least}"
        if self.best == self.ratio:  # of blocks, only the mean is known
            return f"{self.num_pairs} {what} gain less than {least} on average"
        return f"none of {self.num_pairs} {what} gains {least}"

    @property
    def is_settled(self) -> bool:
        return self.is_kept or self.is_none

    @property
    def is_precise(self) -> bool:
        """Whether its interval is narrow enough to tell; how little nothing is need not be known."""
        return self.is_none or (self.num_pairs >= FEWEST_PAIRS and self.high <= PRECISE * self.ratio)


def gain_of(pairs: Sequence[tuple[TrialResult, TrialResult]], *, least_spread: float = 0.0) -> Gain:
    """Compare pairs of (plain, treated) trials, which spread at least as far as those of the job itself."""
    ratios = _log_ratios(pairs)
    middle, best = fmean(ratios), math.exp(max(ratios))
    if len(ratios) < 2:
        return Gain(ratio=math.exp(middle), low=0.0, high=math.inf, num_pairs=len(ratios), best=best)
    spread = max(stdev(ratios), least_spread)
    half = _quantile(T_TWO, len(ratios) - 1) * spread / math.sqrt(len(ratios))
    return Gain(
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        num_pairs=len(ratios),
        best=best,
    )


def spread_of(pairs: Sequence[tuple[TrialResult, TrialResult]]) -> float:
    """Return the standard deviation of the logarithms of the pairs' ratios."""
    return stdev(_log_ratios(pairs))


def _log_ratios(pairs: Sequence[tuple[TrialResult, TrialResult]]) -> list[float]:
    return [math.log(median(plain.blocks_s) / median(treated.blocks_s)) for plain, treated in pairs]


def gains_of_arms(arms: Sequence[ArmResult]) -> tuple[dict[str, Gain], Gain | None]:
    """Return the gains of switched treatments by label, and that of the arm that changes nothing.

    No interval is narrower than that of the empty arm: on a busy machine few blocks may agree by chance.
    """
    noise = next((_gain_of_arm(arm) for arm in arms if arm.label == Same.label), None)
    found = {arm.label: _gain_of_arm(arm) for arm in arms if arm.label != Same.label}
    if noise is None:
        return found, None
    below, above = max(1.0, noise.high), min(1.0, noise.low)
    wide = {
        label: replace(gain, low=min(gain.low, gain.ratio / below), high=max(gain.high, gain.ratio / above))
        for label, gain in found.items()
    }
    return wide, noise


def _gain_of_arm(arm: ArmResult) -> Gain:
    return Gain(ratio=arm.ratio, low=arm.low, high=arm.high, num_pairs=arm.num_blocks, best=arm.ratio)


def smallest_gain(noise: Gain) -> float:
    """Return the smallest gain that would be kept after all pairs, if they vary like those of `noise`."""
    half = math.log(noise.high / noise.low) / 2
    spread = half * math.sqrt(noise.num_pairs) / _quantile(T_TWO, max(1, noise.num_pairs - 1))
    return LEAST_GAIN * math.exp(_quantile(T_TWO, MOST_PAIRS - 1) * spread / math.sqrt(MOST_PAIRS))


@dataclass(frozen=True, kw_only=True, slots=True)
class JobGain:
    """What a treatment costs before the first block, and when that has paid off."""

    extra_s: float  # beyond the job's own start
    pays_after: int | None  # steps; None if it never does
    ratio: float | None = None  # of the whole job, if its number of steps is known
    num_steps: int | None = None


def job_gain_of(
    pairs: Sequence[tuple[TrialResult, TrialResult]], *, num_steps: int | None = None
) -> JobGain | None:
    """Account for the start: imports, the first batch, compilation.

    Starts that differ by no more than they vary from pair to pair count as equal.
    """
    found = [(start_s(plain), start_s(treated)) for plain, treated in pairs]
    starts = [(plain, treated) for plain, treated in found if plain is not None and treated is not None]
    if not starts:
        return None
    plain_s, treated_s = (median(median(each.blocks_s) for each in arm) for arm in zip(*pairs, strict=True))
    plain_start_s, treated_start_s = (median(each) for each in zip(*starts, strict=True))
    if not _is_beyond_chance([treated - plain for plain, treated in starts]):
        plain_start_s = treated_start_s = median(each for pair in starts for each in pair)
    extra_s = treated_start_s - plain_start_s
    saved_s = plain_s - treated_s
    ratio = None
    if num_steps is not None:
        ratio = (plain_start_s + num_steps * plain_s) / (treated_start_s + num_steps * treated_s)
    pays_after = max(0, math.ceil(extra_s / saved_s)) if saved_s > 0 else None
    return JobGain(extra_s=extra_s, pays_after=pays_after, ratio=ratio, num_steps=num_steps)


def _is_beyond_chance(differences: Sequence[float]) -> bool:
    """Return whether the 95 % interval of differences excludes 0; one alone is taken as it is."""
    num = len(differences)
    if num < 2:
        return True
    half = _quantile(T_TWO, num - 1) * stdev(differences) / math.sqrt(num)
    return abs(fmean(differences)) > half


def start_s(trial: TrialResult) -> float | None:
    """Return the time before the steps reach their pace, without the steps themselves."""
    if trial.before_s is None or not trial.blocks_s:
        return None
    return max(0.0, trial.before_s - trial.num_steps_before * median(trial.blocks_s))


def _quantile(table: dict[int, float], freedom: int) -> float:
    return table[max(known for known in table if known <= freedom)]


def failure(trial: TrialResult, *, like: TrialResult | None = None, any_length: bool = False) -> str | None:
    """Return why a trial cannot be judged, or None; `like` is the job without the treatment.

    Only runs whose times alone are compared may differ in length.
    """
    if trial.ended == "crashed":
        return f"the script raised {trial.error}"
    if trial.ended == "killed":
        return f"the script {trial.error}"
    if trial.ended == "finished":
        return f"the script ended after {trial.num_steps} steps, before it could be measured"
    if not (trial.blocks_s or trial.arms) or not all(each > 0 for each in trial.blocks_s):
        return "no step was timed"
    if not trial.losses:
        return "no loss was seen, so nothing was verified"
    if not all(map(math.isfinite, trial.losses)):
        return "a loss is not finite"
    return None if like is None else _works_otherwise(trial, like, any_length=any_length)


def by_step(trial: TrialResult) -> TrialResult:
    """Return the trial with one loss per step, the sum over its batches, and no batches."""
    num_each, rest = divmod(len(trial.losses), max(1, trial.num_steps))
    losses = trial.losses
    if num_each and not rest:
        losses = tuple(sum(losses[at : at + num_each]) for at in range(0, len(losses), num_each))
    return replace(trial, losses=losses, batches={}, reads=())


def _works_otherwise(trial: TrialResult, like: TrialResult, *, any_length: bool) -> str | None:
    if trial.num_skipped > like.num_skipped:
        return f"{trial.num_skipped - like.num_skipped} steps were skipped: their gradients were not finite"
    if trial.trained != like.trained:
        return f"{trial.trained} parameters have a gradient instead of {like.trained}"
    if trial.formats != like.formats:
        return f"the weights are {_formats(trial)} instead of {_formats(like)}"
    if trial.still > like.still:
        return f"{trial.still - like.still} parameters are no longer changed by a step"
    if trial.still_at_end > like.still_at_end:
        return f"{trial.still_at_end - like.still_at_end} parameters are no longer changed by all steps"
    as_often = len(trial.losses) * like.num_steps == len(like.losses) * trial.num_steps
    if not as_often or (trial.num_steps != like.num_steps and not any_length):
        return (
            f"the number of losses or of steps changed: {len(trial.losses)} in {trial.num_steps} steps"
            f" instead of {len(like.losses)} in {like.num_steps}"
        )
    return None


def _formats(trial: TrialResult) -> str:
    return " and ".join(sorted(set(trial.formats))) or "unknown"


def is_reproducible(one: TrialResult, other: TrialResult) -> bool:
    """Return whether two runs of the same arm computed the same, bit for bit."""
    return (one.losses, one.checked, one.batches, one.others) == (
        other.losses,
        other.checked,
        other.batches,
        other.others,
    )


def repeats_first_step(one: TrialResult, other: TrialResult) -> bool:
    """Return whether two runs of the same arm start alike, bit for bit, though they diverge later."""
    known = one.checked.get("1")
    return known is not None and one.start == other.start and known == other.checked.get("1")


def serves_other_batches(plain: TrialResult, treated: TrialResult) -> str | None:
    """Return which batch differs; None if the compared ones are the same."""
    shared = plain.batches.keys() & treated.batches.keys()
    if plain.batches and not shared:
        return "no batch of its loaders was seen, so nothing was verified"
    for name in sorted(shared, key=lambda name: [int(part) for part in name.split(".")]):
        if plain.batches[name] != treated.batches[name]:
            loader, _, number = name.partition(".")
            return f"batch {number} of loader {loader} differs"
    return None


def reads_other_losses(plain: TrialResult, treated: TrialResult) -> str | None:
    """Return which loss the script reads at another time; its other reads may differ by rounding."""
    if len(plain.reads) != len(treated.reads):
        return f"the script reads {len(treated.reads)} numbers instead of {len(plain.reads)}"
    places: dict[float, list[int]] = {}
    for number, loss in enumerate(plain.losses):
        places.setdefault(loss, []).append(number)
    for one, other in zip(plain.reads, treated.reads, strict=True):
        known = places.get(one, [])
        if len(known) == 1 and other != treated.losses[known[0]]:
            return f"the script reads {other:.7g} where loss {known[0] + 1} is {treated.losses[known[0]]:.7g}"
    return None


def differs_exactly(plain: TrialResult, treated: TrialResult) -> str | None:
    """Return why an exact treatment of a job that repeats is not exact; None if it is."""
    if plain.start != treated.start:
        return "the weights before the first step differ"
    for number, (one, other) in enumerate(zip(plain.losses, treated.losses, strict=True)):
        if one != other:
            return f"loss {number + 1} is {other:.7g} instead of {one:.7g}"
    for step, known in plain.checked.items():
        found = treated.checked.get(step)
        if found is None or found.gradients != known.gradients:
            return f"the gradients of step {step} differ"
        if found.parameters != known.parameters:
            return f"the parameters after step {step} differ"
    if plain.others != treated.others:
        return OTHERS_DIFFER
    return None if plain.checked else "no step was compared, so nothing was verified"


def differs_at_first(plain: TrialResult, treated: TrialResult) -> str | None:
    """Do the same for a job whose runs start alike and diverge later."""
    if repeats_first_step(plain, treated):
        return None
    return "the job's runs start alike, but the treatment's run starts differently"


def starts_otherwise(plain: TrialResult, other: TrialResult) -> str | None:
    """Return why first steps cannot be compared: they start from other weights or batches."""
    if not plain.losses or not other.losses or plain.start is None:
        return "no loss was seen at the first step"
    if plain.start != other.start:
        return "the weights before the first step are not the same from run to run"
    if (reason := serves_other_batches(plain, other)) is not None:
        return reason
    one, two = plain.losses[0], other.losses[0]
    if not abs(one - two) <= SAME_LOSS * max(abs(one), abs(two)):
        return f"the first loss is {two:.6g} instead of {one:.6g}"
    return None


def differs_by_more_than_rounding(
    plain: Path, treated: Path, exact: Path, *, is_half: bool = False
) -> str | None:
    """Compare gradients and changes of the first step with 64 bits; return the reason if they differ."""
    from safetensors.torch import load_file

    ours, theirs, right = (load_file(path) for path in (plain, treated, exact))
    if not right or ours.keys() != theirs.keys() or ours.keys() != right.keys():
        return "the first step has other parameters than in 64 bits, so nothing was verified"
    factor = HALF_ERROR_FACTOR if is_half else ERROR_FACTOR
    for name, reference in right.items():
        size = float(reference.norm())
        own, other = (float((each[name] - reference).norm()) for each in (ours, theirs))
        what, _, number = name.partition(".")
        floor = CHANGE_FLOOR if what == "change" else ERROR_FLOOR
        if not (math.isfinite(own) and other <= factor * own + floor * size):
            return (
                f"the {what} of parameter {number} is {other / max(size, 1e-300):.2g} off,"
                f" the job's own {own / max(size, 1e-300):.2g}"
            )
    return None


def steps_otherwise(plain: Path, treated: Path) -> str | None:
    """Return how the first step's length differs from the job's; late losses may not show that."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(path) for path in (plain, treated))
    if not ours or ours.keys() != theirs.keys():
        return "the first step has other parameters, so nothing was verified"
    one, other = (
        math.sqrt(sum(float(value.norm()) ** 2 for name, value in each.items() if name.startswith("change")))
        for each in (ours, theirs)
    )
    if not abs(other - one) <= STEP_MARGIN * one:
        return f"the first step goes {other / max(one, 1e-300):.3g} times as far"
    return None


def drops_nothing(
    runs: tuple[TrialResult, TrialResult], without_dropout: tuple[TrialResult, TrialResult]
) -> str | None:
    """Return the reason if dropout changes the job's first loss but not that of the treated job."""
    effect, other = map(effect_of_dropout, runs, without_dropout)
    if effect > DROPOUT_FACTOR * ERROR_FLOOR and other < ERROR_FLOOR:
        return f"dropout changes the job's first loss by {effect:.1e}, and not that of the treated job"
    return None


def effect_of_dropout(run: TrialResult, without: TrialResult) -> float:
    """Return how much dropout changes the first loss, as a share of it."""
    return abs(run.losses[0] - without.losses[0]) / max(abs(without.losses[0]), 1e-12)


def has_dropout(run: TrialResult, without: TrialResult) -> bool:
    """Return whether dropout changes the first loss by more than rounding."""
    return effect_of_dropout(run, without) > DROPOUT_FACTOR * ERROR_FLOOR


def drops_less(
    pairs: Sequence[tuple[TrialResult, TrialResult]],
    without_dropout: Sequence[tuple[TrialResult, TrialResult]],
) -> str | None:
    """Return the reason if the treated job drops less than the job: losses without dropout do not show that.

    Both hold the same seeds.  Each mask moves its loss by chance, so from one loss to the next the effect of
    dropout jumps, and the jumps shrink with what is dropped.  Where the weights of two runs diverge
    fast, only early losses show that.
    """
    found = [
        list(zip(_jumps(plain, plain_without), _jumps(treated, treated_without), strict=False))
        for (plain, treated), (plain_without, treated_without) in zip(pairs, without_dropout, strict=False)
    ]
    for share in (EARLY_SHARE, 1.0):
        ratios = [
            math.log(other / one) for each in found for one, other in each[: math.ceil(share * len(each))]
        ]
        if len(ratios) < 2:
            continue
        mean, error = fmean(ratios), stdev(ratios) / math.sqrt(len(ratios))
        if mean + DROPS_LESS_ERRORS * error < 0:
            return f"dropout moves the treated job's losses {math.exp(mean):.2g} times as far as the job's"
    return None


def _jumps(run: TrialResult, without: TrialResult) -> list[float]:
    """Return how far the effect of dropout moves from one loss to the next."""
    effects = [one - other for one, other in zip(run.losses, without.losses, strict=False)]
    floor = ERROR_FLOOR * max(abs(without.losses[0]), 1e-12)
    return [max(abs(later - earlier), floor) for earlier, later in itertools.pairwise(effects)]


def leaves_the_envelope(
    plain: TrialResult, treated: TrialResult, nudged: Sequence[TrialResult]
) -> str | None:
    """Return where losses are further from the job's than rounding takes them, or None."""
    widest = 0.0
    for number, (one, other) in enumerate(zip(plain.losses, treated.losses, strict=False)):
        widest = max(
            widest, *(abs(each.losses[number] - one) for each in nudged if number < len(each.losses))
        )
        allowed = ENVELOPE_FACTOR * widest + ENVELOPE_FLOOR * abs(one)
        if abs(other - one) > allowed:
            return f"loss {number + 1} is {other:.6g} instead of {one:.6g}; rounding explains {allowed:.2g}"
    return None


def changes_other_weights(
    plain: TrialResult, treated: TrialResult, nudged: Sequence[TrialResult]
) -> str | None:
    """Return why weights that no optimizer changes are not the job's, up to rounding; no loss shows them."""
    if len(plain.others) != len(treated.others):
        return OTHERS_DIFFER
    alike = [each.others for each in nudged if len(each.others) == len(plain.others)]
    for number, (one, other) in enumerate(zip(plain.others, treated.others, strict=True)):
        widest = max((abs(others[number] - one) for others in alike), default=0.0)
        if not abs(other - one) <= ENVELOPE_FACTOR * widest + ENVELOPE_FLOOR * abs(one):
            return f"{OTHERS_DIFFER}: a norm is {other:.6g} instead of {one:.6g}"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossChange:
    """The change of the late losses over paired seeds, as a share of the loss.

    Lower losses are no excuse: a larger step size or missing dropout lowers them, too.
    """

    mean: float
    low: float  # one-sided 95 %, each
    high: float
    num_seeds: int

    def __str__(self) -> str:
        return (
            f"late losses change by {self.mean:+.2%} [{self.low:+.2%}, {self.high:+.2%}]"
            f" over {self.num_seeds} seeds"
        )

    @property
    def is_inside(self) -> bool:
        return self.num_seeds >= FEWEST_PAIRS and self.low > -MARGIN and self.high < MARGIN

    @property
    def may_be_chance(self) -> bool:
        return self.num_seeds >= FEWEST_PAIRS and self.low < 0 < self.high

    @property
    def is_outside(self) -> bool:
        return self.num_seeds >= FEWEST_PAIRS and (self.low > MARGIN or self.high < -MARGIN)


def loss_change(pairs: Sequence[tuple[TrialResult, TrialResult]]) -> LossChange:
    """Compare the late losses of (plain, treated) runs of the same seeds."""
    changes = []
    for plain, treated in pairs:
        one, other = _late_loss(plain), _late_loss(treated)
        changes.append((other - one) / max(abs(one), 1e-12))
    spread = stdev(changes) if len(changes) > 1 else math.inf
    half = _quantile(T_ONE, max(1, len(changes) - 1)) * spread / math.sqrt(len(changes))
    mean = fmean(changes)
    return LossChange(mean=mean, low=mean - half, high=mean + half, num_seeds=len(changes))


def seeds_matter(runs: Sequence[TrialResult]) -> bool:
    """Return whether runs with different seeds differ; otherwise they are one run, repeated."""
    return len({run.losses for run in runs}) == len(runs)


def _late_loss(trial: TrialResult) -> float:
    late = max(1, round(LAST_SHARE * len(trial.losses)))
    return fmean(trial.losses[-late:])
