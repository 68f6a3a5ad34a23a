"""How much faster treatments are: in pairs of runs, and in alternating blocks of one run.

Blocks of one run are cheap and avoid differences between processes, so switchable treatments are timed that
way, all of them in one run.  Others are timed in pairs of processes, A B B A, until the answer is settled or
the time is up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
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

TRIALS_AT_END = 2 * FEWEST_PAIRS  # for everything kept together
TRIALS_OF_NUMBERS = 2  # of the job and of the treatment
TRIALS_OF_TIME = 2 * CLEAR_PAIRS  # of a treatment, at least
BLOCKS_SHARE = 0.25  # of the time left, for blocks of one run
NOISE_PAIRS, NOISE_SHARE = 2, 0.25  # the job against itself: fewest pairs, and the share of the time for more
TRIALS_EACH = 6  # that a treatment takes, roughly

NOISE = "the job against itself"

Pairs = list[tuple[TrialResult, TrialResult]]  # of runs without and with a treatment


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
        self._plain_s = self._longest_s = 0.0  # the longest trial of a pair so far: of the job, and of all
        self._start_s = 0.0  # of these, before the steps of the job reach their pace
        self._sets_aside = False  # time for the end

    def set_aside(self, *, at_end: bool) -> None:
        """Set time aside to measure everything kept together, if that is needed; a trial ends before it."""
        self._sets_aside = at_end
        self.trials.ends_s = self._ends_s - self._at_end_s

    @property
    def _at_end_s(self) -> float:
        """The seconds that are set aside."""
        return TRIALS_AT_END / 2 * (self._plain_s + self._longest_s) if self._sets_aside else 0.0

    def is_late(self, *, num_trials: int = 0, num_beside: int = 0) -> bool:
        """Return whether so many trials would not end before the time that is set aside.

        `num_beside` more run beside each other: their starts overlap, and a GPU takes their steps in turn.
        """
        rounds = math.ceil(num_beside / self.trials.at_once)
        beside_s = rounds * self._start_s + num_beside * (self._plain_s - self._start_s)
        took_s = num_trials * self._longest_s + beside_s + self._at_end_s
        return time.monotonic() + took_s > self._ends_s

    def is_up(self) -> bool:
        """Return whether trials are ended because there is no more time."""
        return time.monotonic() >= self.trials.ends_s

    def has_time_for(self, num_treatments: int) -> bool:
        """Return whether so many treatments can be tried before the end."""
        more = 0 if self._sets_aside else TRIALS_AT_END
        return not self.is_late(num_trials=TRIALS_EACH * num_treatments + more)

    def job_against_itself(self, *, then: Sequence[Unit] = ()) -> Pairs:
        """Run pairs of the job with nothing changed; raise BadInput if they cannot be judged.

        The last run has its weights changed in the last bit, which changes its losses and not its time.
        `then` are the trials that most likely come next.
        """
        alike, nudged = pair_of([], []), pair_of([], [], **NUDGED)
        self.trials.expect(NOISE, [nudged, *[alike] * (FEWEST_PAIRS - 1)])
        self.trials.expect(AHEAD, then)
        pairs = self.pairs[NOISE] = []
        while len(pairs) < FEWEST_PAIRS and (
            len(pairs) < NOISE_PAIRS or 2 * (len(pairs) + 1) * self._longest_s < NOISE_SHARE * self._within_s
        ):
            self._say(f"{NOISE}, pair {len(pairs) + 1}")
            nudges = len(pairs) == 1 and self.nudged is None
            pair = self._run_pair([], [], **(NUDGED if nudges else {}))
            if nudges:
                self.nudged = pair[1]
                if verdict.failure(self.nudged) is not None:  # then another run takes its place
                    continue
            for run in pair:
                if reason := verdict.failure(run):
                    raise BadInput(f"the job cannot be tuned: {reason}", hint=hint_of(run, self.trials.plan))
            pairs.append(pair)
            self._plain_s = self._longest_s
            self._start_s = max(min(self._plain_s, verdict.start_s(run) or 0.0) for run in pair)
        self.trials.forget(NOISE)
        return pairs

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
                if pairs:
                    gain = verdict.gain_of(pairs)
                    is_over = len(pairs) >= FEWEST_PAIRS and self._asks_too_much(gain)
                    is_over |= (gain.is_settled or len(pairs) >= fewest) and self.is_late(num_trials=2)
                    is_enough = gain.is_precise if is_precise else gain.is_settled
                    if is_enough or is_over or len(pairs) >= MOST_PAIRS:
                        return gain
                pairs.append(self._next_pair(without, with_, label=label))
        finally:
            self.trials.forget(label)

    def _next_pair(
        self, without: Sequence[Dose], with_: Sequence[Dose], *, label: str
    ) -> tuple[TrialResult, TrialResult]:
        number = len(self.pairs[label])
        self._say(f"{label}: time, pair {number + 1}")
        (first, _), (second, _) = one_pair(without, with_, number)
        found = self._run_pair(first, second)
        plain, treated = found if number % 2 == 0 else reversed(found)
        if regroups([*without, *with_]):
            plain, treated = verdict.by_step(plain), verdict.by_step(treated)
        if reason := verdict.failure(plain) or verdict.failure(treated, like=plain, any_length=True):
            raise CannotBeTimed(reason)
        return plain, treated

    def _asks_too_much(self, gain: Gain) -> bool:
        """Return whether the time is better spent on others than on an apparent zero gain."""
        return self._within_s < math.inf and gain.ratio < LEAST_GAIN

    def _run_pair(
        self, first: Sequence[Dose], second: Sequence[Dose], **changes: Any
    ) -> tuple[TrialResult, TrialResult]:
        began_s = time.monotonic()
        found = self.trials.run_pair(first, second, **changes)
        took_s = max((time.monotonic() - began_s) / 2, *map(_seconds_of, found))  # known results take none
        self._longest_s = max(self._longest_s, took_s)
        return found

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


def _seconds_of(run: TrialResult) -> float:
    """Return how long a trial took, as far as it measured that."""
    num_timed = run.num_steps - run.num_steps_before
    return (run.before_s or 0.0) + (num_timed * fmean(run.blocks_s) if run.blocks_s else 0.0)


def one_pair(without: Sequence[Dose], with_: Sequence[Dose], number: int) -> Unit:
    """Return a pair of runs; every second pair starts with the treatment."""
    return pair_of(without, with_) if number % 2 == 0 else pair_of(with_, without)
