"""How much faster treatments are: in pairs of runs, and in alternating blocks of one run.

Blocks of one run are cheap and avoid differences between processes, so switchable treatments are timed that
way, all of them in one run.  Others are timed in pairs of processes, A B B A, until the answer is settled or
the time is up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flatout.ground import OnProgress
from flatout.ground.errors import BadInput
from flatout.measure.evidence import Evidence
from flatout.tuner import verdict
from flatout.tuner.numbers import NUDGED, regroups
from flatout.tuner.search.plan import seconds_for
from flatout.tuner.treatment import Dose, treatment_of
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trial.switched import FEWEST_ROUNDS, LEAST_GAIN
from flatout.tuner.trials import AHEAD, Trials, Unit, hint_of, pair_of
from flatout.tuner.verdict import CLEAR_PAIRS, FEWEST_PAIRS, MOST_PAIRS, Gain

TRIALS_OF_NUMBERS = 2  # of the job and of the treatment
BLOCKS_SHARE = 0.25  # of the time left, for blocks of one run
NOISE_PAIRS, NOISE_SHARE = 2, 0.25  # the job against itself: fewest pairs, and the share of the time for more
PAIRS_EACH = 3  # that a treatment takes, roughly

NOISE = "the job against itself"

Pairs = list[tuple[TrialResult, TrialResult]]  # of runs without and with a treatment


@dataclass(frozen=True, kw_only=True, slots=True)
class Took:
    """The seconds of a trial."""

    start_s: float = 0.0  # until the steps reach their pace, without the steps themselves
    steps_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.start_s + self.steps_s


class CannotBeTimed(Exception):
    """A trial cannot be judged."""


class Times:
    """Times the trials of one job, within the given seconds."""

    def __init__(
        self, trials: Trials, evidence: Evidence, *, within_s: float | None, say: OnProgress
    ) -> None:
        self.trials, self.evidence, self._say = trials, evidence, say
        self.pairs: dict[str, Pairs] = {}  # runs without and with a treatment, by label
        self._pairs_on: dict[str, list[Dose]] = {}  # what both runs had, by label
        self.in_run: dict[str, Gain] = {}  # gains of switched treatments
        self.in_run_on: list[Dose] | None = None  # what was kept when they were measured
        self.noise_in_run: Gain | None = None
        self.nudged: TrialResult | None = None  # the job whose weights were changed in the last bit
        self._within_s = math.inf if within_s is None else within_s
        self._ends_s = time.monotonic() + self._within_s
        self._took: dict[frozenset[Dose], Took] = {}  # by a trial of a pair at most, by its treatments
        self._spread = 0.0  # of the job against itself
        self._each = Took()  # by a trial on top of what is kept
        self._at_end_s = 0.0  # set aside

    def set_aside(self, kept: Sequence[Dose], *, at_end: bool) -> None:
        """Set time aside to measure everything kept together, if that is needed; a trial ends before it."""
        self._each = self._took_with(kept)
        num_pairs = FEWEST_PAIRS if at_end else 0
        self._at_end_s = self._seconds_of_pairs(num_pairs, self._took_with([]), self._each)
        self.trials.ends_s = self._ends_s - self._at_end_s

    def _took_with(self, doses: Sequence[Dose]) -> Took:
        """Return how long a trial with these treatments takes; as the longest one, if that is not known."""
        longest = max(self._took.values(), key=lambda took: took.total_s, default=Took())
        return self._took.get(frozenset(doses), longest)

    def _seconds_of_pairs(self, num_pairs: int, without: Took, with_: Took) -> float:
        """Estimate the time of pairs of trials: those that start beside each other have one start."""
        if self.trials.at_once == 1:
            return num_pairs * (without.total_s + with_.total_s)
        rounds = math.ceil(2 * num_pairs / self.trials.at_once)
        return rounds * max(without.start_s, with_.start_s) + num_pairs * (without.steps_s + with_.steps_s)

    def is_late(self, *, num_trials: int = 0, num_pairs: int = 0, num_beside: int = 0) -> bool:
        """Return whether so many trials and pairs of them would not end before the time that is set aside.

        `num_beside` trials more run beside each other: their starts overlap, and a GPU takes their steps in
        turn.
        """
        each = self._each
        seconds = num_trials * each.total_s + self._seconds_of_pairs(num_pairs, each, each)
        rounds = math.ceil(num_beside / self.trials.at_once)
        return self._is_beyond(seconds + rounds * each.start_s + num_beside * each.steps_s)

    def _is_beyond(self, seconds: float) -> bool:
        return time.monotonic() + seconds + self._at_end_s > self._ends_s

    def is_up(self) -> bool:
        """Return whether trials are ended because there is no more time."""
        return time.monotonic() >= self.trials.ends_s

    def has_time_for(self, num_treatments: int) -> bool:
        """Return whether so many treatments can be tried before the end."""
        return not self.is_late(
            num_pairs=PAIRS_EACH * num_treatments + (0 if self._at_end_s else FEWEST_PAIRS)
        )

    def job_against_itself(self, *, then: Sequence[Unit] = ()) -> Pairs:
        """Run pairs of the job with nothing changed; raise BadInput if they cannot be judged.

        The last run has its weights changed in the last bit, which changes its losses and not its time.
        `then` are the trials that most likely come next.
        """
        alike, nudged = pair_of([], []), pair_of([], [], **NUDGED)
        self.trials.expect(NOISE, [nudged, *[alike] * (FEWEST_PAIRS - 1)])
        self.trials.expect(AHEAD, then)
        pairs = self.pairs[NOISE] = []
        while num := self._num_of_noise(len(pairs)):
            self._say(f"{NOISE}, pair {len(pairs) + 1}")
            if len(pairs) == 1:  # the very first trial alone may have imported torch itself
                self._took.clear()
            asked = [alike] * num
            if self.nudged is None and len(pairs) + num >= NOISE_PAIRS:
                asked[-1] = nudged
            for unit, pair in zip(asked, self._run_pairs(asked), strict=True):
                if unit is nudged:
                    self.nudged = pair[1]
                    if verdict.failure(self.nudged) is not None:  # then another run takes its place
                        continue
                for run in pair:
                    if reason := verdict.failure(run):
                        hint = hint_of(run, self.trials.plan)
                        raise BadInput(f"the job cannot be tuned: {reason}", hint=hint)
                pairs.append(pair)
        self.trials.forget(NOISE)
        self._spread = verdict.spread_of(pairs)
        return pairs

    def _num_of_noise(self, num_known: int) -> int:
        """Return how many pairs of the job with itself come next."""
        if num_known < NOISE_PAIRS:
            return min(NOISE_PAIRS - num_known, self._room)
        took = self._took_with([])
        all_s = self._seconds_of_pairs(num_known + 1, took, took)
        return int(num_known < FEWEST_PAIRS and all_s < NOISE_SHARE * self._within_s)

    @property
    def _room(self) -> int:
        """The pairs that run at once."""
        return max(1, self.trials.at_once // 2)

    def gain(self, without: Sequence[Dose], with_: Sequence[Dose], *, label: str) -> Gain:
        """Alternate two arms, A B B A, until the answer is settled or another pair would end too late."""
        self.pairs[label], self._pairs_on[label] = [], list(without)
        return self._alternate(without, with_, label=label)

    def total(self, kept: Sequence[Dose], *, label: str) -> Gain:
        """Alternate the job and everything kept until the gain is precise, or as in `gain`.

        The pairs of a single treatment that was timed beside the job itself count.
        """
        self.pairs[label] = self.pairs_of_one(kept)
        return self._alternate([], kept, label=label, is_precise=True)

    def pairs_of_one(self, kept: Sequence[Dose]) -> Pairs:
        """Return the pairs of the job itself and a single kept treatment, so far."""
        known = str(kept[0]) if len(kept) == 1 else ""
        return list(self.pairs[known]) if self._pairs_on.get(known) == [] else []

    def _alternate(
        self, without: Sequence[Dose], with_: Sequence[Dose], *, label: str, is_precise: bool = False
    ) -> Gain:
        pairs, fewest = self.pairs[label], FEWEST_PAIRS if is_precise else CLEAR_PAIRS
        ahead = [one_pair(without, with_, number) for number in range(len(pairs), FEWEST_PAIRS)]
        self.trials.expect(label, ahead)
        try:
            while True:
                wanted = fewest if len(pairs) < fewest else FEWEST_PAIRS
                num = max(1, min(wanted - len(pairs), self._room))
                if pairs:
                    gain = verdict.gain_of(pairs, least_spread=self._spread)
                    is_over = len(pairs) >= FEWEST_PAIRS and self._asks_too_much(gain)
                    is_over |= (gain.is_settled or len(pairs) >= fewest) and self._is_beyond(
                        self._seconds_of_pairs(num, self._took_with(without), self._took_with(with_))
                    )
                    is_enough = gain.is_precise if is_precise else gain.is_settled
                    if is_enough or is_over or len(pairs) >= MOST_PAIRS:
                        return gain
                pairs += self._next_pairs(num, without, with_, label=label)
        finally:
            self.trials.forget(label)

    def _next_pairs(
        self, num: int, without: Sequence[Dose], with_: Sequence[Dose], *, label: str
    ) -> list[tuple[TrialResult, TrialResult]]:
        begins = len(self.pairs[label])
        self._say(f"{label}: time, pair {begins + 1}")
        units = [one_pair(without, with_, number) for number in range(begins, begins + num)]
        pairs = []
        for number, found in enumerate(self._run_pairs(units), begins):
            plain, treated = found if number % 2 == 0 else reversed(found)
            if regroups([*without, *with_]):
                plain, treated = verdict.by_step(plain), verdict.by_step(treated)
            if reason := verdict.failure(plain) or verdict.failure(treated, like=plain, any_length=True):
                raise CannotBeTimed(reason)
            pairs.append((plain, treated))
        return pairs

    def _asks_too_much(self, gain: Gain) -> bool:
        """Return whether the time is better spent on others than on an apparent zero gain."""
        return self._within_s < math.inf and gain.ratio < LEAST_GAIN

    def _run_pairs(self, units: Sequence[Unit]) -> Pairs:
        """Run pairs of trials, and note how long they take."""
        began_s, at_once = time.monotonic(), min(self.trials.at_once, 2 * len(units))
        pairs = self.trials.run_pairs(units)
        runs = [run for pair in pairs for run in pair]
        known = [_took(run) for run in runs]  # what they measured: recorded results take no time
        rounds = math.ceil(len(runs) / at_once)
        starts_s = (
            sum(each.start_s for each in known) if at_once == 1 else max(each.start_s for each in known)
        )
        rest_s = time.monotonic() - began_s - starts_s - sum(each.steps_s for each in known)
        for (doses, _), took in zip((arm for unit in units for arm in unit), known, strict=True):
            before = self._took.get(frozenset(doses), Took())
            self._took[frozenset(doses)] = Took(
                start_s=max(before.start_s, took.start_s + max(0.0, rest_s) / rounds),
                steps_s=max(before.steps_s, took.steps_s),
            )
        return pairs

    def switch(self, doses: Sequence[Dose], kept: Sequence[Dose]) -> None:
        """Measure treatments in alternating blocks of one run, on top of those already kept."""
        self.in_run_on = list(kept)
        for dose in doses:
            self.in_run.pop(str(dose), None)
        if not (units := self.switched_units(doses, kept)):
            return
        self._say(f"in one run: {', '.join(map(str, doses))}")
        self.trials.expect("in one run", units)
        for found in [self.trials.run(kept, **changes) for ((_, changes),) in units]:
            if found.ended not in ("measured", "finished"):  # each is then tried in its own processes
                continue
            gains, same = verdict.gains_of_arms(found.arms)
            self.noise_in_run = self.noise_in_run or same
            self.in_run |= {
                label: gain
                for label, gain in gains.items()
                if gain.is_none or gain.num_pairs >= FEWEST_ROUNDS
            }

    def switched_units(self, doses: Sequence[Dose], kept: Sequence[Dose]) -> list[Unit]:
        """Return the runs that switch these treatments, one for each of several nodes.

        There are none for several ranks, which must act alike at the same time.
        """
        if not doses or self.evidence.job.world_size > 1:
            return []
        share = min(self.trials.slots, len(doses))
        return [((tuple(kept), self._blocks_of(doses[place::share])),) for place in range(share)]

    def gain_beside(self, dose: Dose, others: Sequence[Dose], kept: Sequence[Dose]) -> Gain | None:
        """Return what a treatment gains on top of the others of `kept`; None if it could not be measured."""
        if in_run := self.switched_units([dose] if treatment_of(dose).switch is not None else [], others):
            ((_, changes),) = in_run[0]
            found = self.trials.run(others, **changes)
            gain = verdict.gains_of_arms(found.arms)[0].get(str(dose))
            if gain is not None and gain.is_settled:
                return gain
        try:
            return self.gain(others, kept, label=f"without {dose}")
        except CannotBeTimed:
            return None

    def _blocks_of(self, doses: Sequence[Dose]) -> dict[str, Any]:
        """Return the trial options that switch these treatments in blocks."""
        return {
            "arms": tuple(doses),
            "seconds": min(
                seconds_for(len(doses) + 1, self.evidence.step_s or 0.0),
                BLOCKS_SHARE * max(0.0, self._ends_s - time.monotonic()),
            ),
        }


def _took(run: TrialResult) -> Took:
    """Return how long a trial took, as far as it measured that."""
    start_s = verdict.start_s(run) or 0.0
    num_timed = run.num_steps - run.num_steps_before
    whole_s = (run.before_s or 0.0) + (num_timed * fmean(run.blocks_s) if run.blocks_s else 0.0)
    return Took(start_s=start_s, steps_s=whole_s - start_s)


def one_pair(without: Sequence[Dose], with_: Sequence[Dose], number: int) -> Unit:
    """Return a pair of runs; every second pair starts with the treatment."""
    return pair_of(without, with_) if number % 2 == 0 else pair_of(with_, without)
