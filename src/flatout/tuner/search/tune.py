"""A whole tuning: diagnose, try, keep, drop once, write.

    the job against itself -> switchable treatments, all in one run -> each treatment, on top of those kept
    -> each kept treatment left out once -> all together

Switchable treatments are timed first, in alternating blocks of one run, because that is cheap; then the
numbers of those that gain are checked.  For the others numbers come first, with one or two runs, and time
afterwards, in pairs of processes.  The largest possible gain, by the diagnosis, goes first.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.ground import OnProgress, ignore
from flatout.ground.errors import BadInput
from flatout.ground.interrupts import Interrupts
from flatout.hardware.ray_cluster import RayCluster
from flatout.measure.evidence import Evidence
from flatout.tuner import verdict
from flatout.tuner.numbers import TRIALS_OF_LOSSY, Numbers, changes_for
from flatout.tuner.results.kept import keep, keep_patches
from flatout.tuner.results.outcome import NO_TIME, NO_TIME_TO_VERIFY, Answer, Tried, Tuning
from flatout.tuner.results.prescription import Kept, Prescription, Proof
from flatout.tuner.search.ahead import closing_units, likely_units
from flatout.tuner.search.candidates import (
    Candidate,
    Reasons,
    best_first,
    by_ceiling,
    ceilings_of,
    find_patches,
    find_treatments,
    found_in,
    hides_others,
    source_of,
    switchable,
    why_not_together,
)
from flatout.tuner.search.plan import at_once, plan_for, steps_of
from flatout.tuner.search.times import (
    TRIALS_OF_NUMBERS,
    CannotBeTimed,
    Pairs,
    Times,
)
from flatout.tuner.treatment import Dose, Treatment, Value, all_treatments, read_dose, treatment_of
from flatout.tuner.trial.journal import Journal, journal_path
from flatout.tuner.trial.on_cluster import ClusterTrials
from flatout.tuner.trial.switched import LEAST_GAIN
from flatout.tuner.trials import AHEAD, Trials, Unit
from flatout.tuner.verdict import CLEAR_PAIRS, Gain, JobGain

ALL_OF_IT = 0.9  # of a measured ceiling: beyond it no other value of a treatment is tried

TOGETHER = "everything kept"
TIMES_KERNELS = re.compile(r"benchmark\s*=\s*True")  # torch.backends.cudnn's, or a trainer's


class Tuner:
    """Tries the treatments of one job."""

    def __init__(
        self,
        evidence: Evidence,
        command: Sequence[str],
        *,
        module: bool,
        allow_lossy: bool,
        only: Sequence[str] = (),
        patch: bool = False,
        on_progress: OnProgress,
        journal: Journal | None = None,
        cluster: RayCluster | None = None,
        within_s: float | None = None,
    ) -> None:
        if evidence.step_s is None:
            raise BadInput("no step of the job was measured", hint="flatout diagnose says what it saw")
        self.evidence, self.command, self.allow_lossy = evidence, tuple(command), allow_lossy
        self.only = {dose.name: dose.value for dose in map(read_dose, only)}
        self.patch, self.on_progress = patch, on_progress
        start = Trials if cluster is None else functools.partial(ClusterTrials, cluster)
        trials = start(
            command,
            module=module,
            plan=plan_for(evidence),
            on_progress=on_progress,
            journal=journal,
            ranks=evidence.job.world_size,
        )
        self.times = Times(trials, evidence, within_s=within_s, say=self._say)
        self.ceilings, self.found = ceilings_of(evidence), found_in(evidence)
        self._later: Sequence[Candidate] = ()  # candidates that come next
        self._then: Sequence[Candidate] = ()  # and those after them
        self._place = ""  # progress through the candidates, for messages
        self.kept: list[Dose] = []
        self.tried: list[Tried] = []
        self.checks: dict[str, str] = {}  # how the numbers of a treatment were verified

    @property
    def trials(self) -> Trials:
        return self.times.trials

    def run(self) -> Tuning:
        """Try everything; remove the trials' folder afterwards, whatever happens."""
        with self.trials:
            rewrites, cannot = self._find_patches()
            treatments, left_out = find_treatments(
                self.evidence, self.command, only=self.only, allow_lossy=self.allow_lossy
            )
            noise = self._measure_noise([*rewrites, *self._by_ceiling(treatments)])
            self._note_untried(cannot)
            self._try_all(rewrites, order=list, then=treatments)
            self._note_untried(left_out)
            self._try_all(treatments, order=self._by_gain)
            self._place = ""
            self._drop_what_no_longer_pays()
            total = self._total()
            self.trials.forget()
            machine = self.trials.machine(self.evidence)
        kept = tuple(self._kept(dose) for dose in self.kept if dose.name in all_treatments())
        others = [dose for dose in self.kept if dose.name not in all_treatments()]
        patches, diff = keep_patches(others, self._kept)
        prescription = Prescription(
            command=self.command,
            treatments=kept,
            proof=self._proof(noise, total) if total else None,
            machine=machine,
            patches=patches,
        )
        return Tuning(
            tried=tuple(self.tried),
            noise=noise,
            noise_in_run=self.times.noise_in_run,
            smallest_gain=verdict.smallest_gain(noise),
            envelope=self.numbers.envelope,
            reproducible=self.numbers.reproducible,
            total=total,
            job=self._job_gain(self.times.pairs.get(TOGETHER, []), self.kept),
            prescription=prescription,
            num_trials=self.trials.num_run,
            step_s=self.evidence.step_s or 0.0,
            diff=diff,
        )

    # -- the job itself

    def _measure_noise(self, then: Sequence[Candidate]) -> Gain:
        """Run the job against itself: does it repeat, how do times vary, what does rounding do to losses?"""
        self.trials.at_once = at_once(self.evidence, ())
        self.trials.times_kernels = bool(TIMES_KERNELS.search(source_of(self.evidence, self.command)))
        pairs = self.times.job_against_itself(then=self._likely_units(then, draws=None))
        nudged = self.times.nudged
        runs = [run for pair in pairs for run in pair if run is not nudged]
        self.trials.at_once = at_once(self.evidence, runs)
        precision = self.evidence.precision
        is_half = precision is not None and precision.autocast is not None
        self.numbers = Numbers(self.trials, runs, nudged=nudged, is_half=is_half)
        return verdict.gain_of(pairs)

    # -- what is tried

    def _find_patches(self) -> tuple[list[Candidate], Reasons]:
        """Return the patches to try, which come first because they change what the rest gains."""
        return find_patches(self.evidence, self.command, only=self.only) if self.patch else ([], [])

    def _by_ceiling(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return by_ceiling(candidates, in_run=self.times.in_run, ceilings=self.ceilings, found=self.found)

    def _by_gain(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Sort by possible gain, and time switchable ones in one run beforehand.

        What was kept since may have hidden their gains, so they are timed again.  A large ceiling of another
        treatment goes before: it would hide them, too.
        """
        ordered = self._by_ceiling(candidates)
        doses = switchable(candidates)
        if not doses or self.times.in_run_on == self.kept:
            return ordered
        self.times.set_aside(self.kept, at_end=True)
        if self.times.is_late(num_trials=1, num_beside=TRIALS_OF_NUMBERS):
            return ordered
        first, _ = ordered[0]
        if first.switch is None and hides_others(first, self.ceilings):
            return ordered
        self.times.switch(doses, self.kept)
        return self._by_ceiling(candidates)

    def _ceilings_of(self, treatment: Treatment) -> list[float]:
        return [self.ceilings[rule] for rule in treatment.rules if rule in self.ceilings]

    # -- one after the other

    def _try_all(
        self,
        candidates: Sequence[Candidate],
        *,
        order: Callable[[Sequence[Candidate]], list[Candidate]],
        then: Sequence[Candidate] = (),
    ) -> None:
        left = candidates
        self._then = then
        while left:
            left = order(left)
            treatment, values = left[0]
            self._place = f"{len(candidates) - len(left) + 1} of {len(candidates)} · "
            self._later = left[1:]
            if self._is_late_for(treatment, values):
                self._note_late(treatment, values)
            else:
                self._look_ahead(left)
                self._try(treatment, values)
            left = left[1:]

    def _is_late_for(self, treatment: Treatment, values: Sequence[Value]) -> bool:
        """Return whether the trials of a treatment, and what is kept then, would end too late.

        What one run showed is timed in whole runs at the end alone; a first treatment timed in pairs is not
        timed again.
        """
        in_run = any(str(Dose(name=treatment.name, value=value)) in self.times.in_run for value in values)
        self.times.set_aside(self.kept, at_end=in_run or bool(self.kept))
        of_numbers = TRIALS_OF_LOSSY if treatment.safety == "lossy" else TRIALS_OF_NUMBERS
        return self.times.is_late(num_pairs=0 if in_run else CLEAR_PAIRS, num_beside=of_numbers)

    def _look_ahead(self, left: Sequence[Candidate]) -> None:
        """Announce the trials that are most likely needed from here on."""
        then = [*left, *self._by_ceiling(self._then)]
        self.trials.expect(AHEAD, self._likely_units(then, draws=self.numbers.plain.draws))

    def _likely_units(self, left: Sequence[Candidate], *, draws: bool | None) -> list[Unit]:
        """Return the trials of the most likely course; `draws` says whether the job draws random numbers."""
        return likely_units(
            left,
            kept=self.kept,
            times=self.times,
            changes_for=functools.partial(changes_for, draws=draws),
            ceilings=self.ceilings,
        )

    def _try(self, treatment: Treatment, values: Sequence[Value]) -> None:
        """Try the values of a treatment, and keep the best of those that pay."""
        doses = best_first(treatment, values, in_run=self.times.in_run)
        ceiling = max(self._ceilings_of(treatment), default=math.inf)
        best: tuple[Dose, Gain] | None = None
        lost: list[Value] = []  # to the best
        for number, dose in enumerate(doses):
            shown = self.times.in_run.get(str(dose))
            if best is not None and shown is not None and shown.is_kept:
                self._note(treatment, dose.value, "no gain", f"{best[0]} gains more", shown)
                continue
            if best is not None and (reason := self._why_no_other(dose, best, lost, ceiling)):
                self._note(treatment, dose.value, "not tried", reason, shown)
                continue
            if number and self._is_late_for(treatment, [dose.value]):
                self._note(treatment, dose.value, "not tried", NO_TIME)
                continue
            if best is None or shown is not None:
                found = self._try_dose(treatment, dose)
            else:
                found = self._try_other(treatment, dose, best)
            self.trials.forget(str(dose))
            if found is None:
                lost.append(dose.value)
                continue
            if best is not None:
                self._note(treatment, best[0].value, "no gain", f"{dose} gains more", best[1])
                lost.append(best[0].value)
            best = dose, found
        if best is not None:
            self.kept.append(best[0])
            self._look_ahead(self._later)  # on top of this treatment
            self._note(treatment, best[0].value, "kept", self.checks[str(best[0])], best[1])

    def _why_no_other(
        self, dose: Dose, best: tuple[Dose, Gain], lost: Sequence[Value], ceiling: float
    ) -> str | None:
        """Return why a value is not tried beside one that pays, or None."""
        known, gain = best
        if gain.ratio >= ALL_OF_IT * ceiling:
            return f"{known} already gains all that is possible"
        if any(_is_between(each, known.value, dose.value) for each in lost):
            return f"{known} gains more than a value between them"
        if not self.times.has_time_for(len(self._later) + 1):
            return f"{known} pays, and the time is needed for other treatments"
        return None

    def _try_dose(self, treatment: Treatment, dose: Dose) -> Gain | None:
        """Return what a treatment with correct numbers gains; otherwise note why it is not kept."""
        if reason := why_not_together([*self.kept, dose]):
            self._note(treatment, dose.value, "not tried", reason)
            return None
        gain = self.times.in_run.get(str(dose))
        if gain is not None and not gain.is_kept:  # timing was cheap, checking numbers is not
            self._note_gain(treatment, dose, gain)
            return None
        if self._judge(treatment, dose, gain) is None:
            return None
        if gain is None:
            try:
                gain = self.times.gain(self.kept, [*self.kept, dose], label=str(dose))
            except CannotBeTimed as error:
                self._note(treatment, dose.value, "failed", str(error))
                return None
        if gain.is_kept:
            return gain
        self._note_gain(treatment, dose, gain)
        return None

    def _try_other(self, treatment: Treatment, dose: Dose, best: tuple[Dose, Gain]) -> Gain | None:
        """Return what a value gains if it gains more than the best so far, which it replaces then.

        Both run beside each other, which takes less time than each beside a slow job.
        """
        known, gain = best
        try:
            more = self.times.gain([*self.kept, known], [*self.kept, dose], label=f"{dose} for {known}")
        except CannotBeTimed as error:
            self._note(treatment, dose.value, "failed", str(error))
            return None
        if not more.is_kept:
            self._note(treatment, dose.value, "no gain", f"{known} gains as much or more")
            return None
        judged = self._judge(treatment, dose, more)
        if judged is None:
            return None
        return Gain(
            ratio=gain.ratio * more.ratio,
            low=gain.low * more.low,
            high=gain.high * more.high,
            num_pairs=min(gain.num_pairs, more.num_pairs),
            best=gain.best * more.best,
        )

    def _judge(self, treatment: Treatment, dose: Dose, gain: Gain | None) -> str | None:
        """Return how the numbers were verified; None if they were not, and note it."""
        self._say(f"{dose}: numbers")
        judged = self.numbers.judge(treatment, self.kept, dose)
        if not judged.is_right:
            self._note(treatment, dose.value, judged.answer, judged.reason, gain)  # type: ignore[arg-type]
            return None
        self.checks[str(dose)] = judged.reason
        return judged.reason

    def _note_late(self, treatment: Treatment, values: Sequence[Value]) -> None:
        """Report what blocks of one run have shown already, if there is no time for more."""
        doses = [Dose(name=treatment.name, value=value) for value in values]
        shown = [(dose, self.times.in_run[str(dose)]) for dose in doses if str(dose) in self.times.in_run]
        for dose, gain in shown:
            if gain.is_kept:
                self._note(treatment, dose.value, "not tried", NO_TIME_TO_VERIFY, gain)
            else:
                self._note_gain(treatment, dose, gain)
        if not shown:
            self._note(treatment, values[0], "not tried", NO_TIME)

    def _note_gain(self, treatment: Treatment, dose: Dose, gain: Gain) -> None:
        what = "blocks" if str(dose) in self.times.in_run else "pairs"
        if gain.is_none:
            self._note(treatment, dose.value, "no gain", gain.why_none(what), gain)
        else:
            reason = f"{gain.num_pairs} {what} do not show whether it gains 3 %"
            self._note(treatment, dose.value, "undecided", reason, gain)

    def _drop_what_no_longer_pays(self) -> None:
        """Leave each kept treatment out once: another may have made it redundant."""
        if len(self.kept) < 2:
            return
        before = list(self.kept)
        self.times.set_aside(self.kept, at_end=True)
        for place, dose in enumerate(before):
            left_out = before[place:] if self.kept != before else before[place:-1]
            self.trials.expect(AHEAD, closing_units(self.kept, leave_out=left_out, times=self.times))
            if self.times.is_late(num_pairs=CLEAR_PAIRS) or (dose == before[-1] and self.kept == before):
                return  # its gain was measured beside the others
            others = [each for each in self.kept if each != dose]
            gain = self.times.gain_beside(dose, others, self.kept)
            if gain is None:
                continue
            number = self._number_of(dose)
            if gain.high < LEAST_GAIN or gain.low < 1:
                self.kept = others
                answer, reason = "dropped again", "next to the others it gains nothing"
            else:
                answer, reason = "kept", self.tried[number].reason
            self.tried[number] = replace(self.tried[number], answer=answer, reason=reason, gain=gain)  # type: ignore[arg-type]

    def _total(self) -> Gain | None:
        """Return what everything kept gains together; keep nothing if whole runs do not show a gain."""
        if not self.kept:
            return None
        self.times.set_aside(self.kept, at_end=False)
        self.trials.ends_s = math.inf  # its time was set aside
        try:
            gain = self.times.total(self.kept, label=TOGETHER)
        except CannotBeTimed as error:
            self._keep_nothing("failed", str(error))
            return None
        if gain.low <= 1:
            shown = f"{gain.ratio:.2f}× [{gain.low:.2f}, {gain.high:.2f}]"
            self._keep_nothing("undecided", f"whole runs with everything kept show no gain: {shown}")
            return None
        if self.times.pairs_of_one(self.kept):
            number = self._number_of(self.kept[0])
            self.tried[number] = replace(self.tried[number], gain=gain)
        return gain

    def _keep_nothing(self, answer: Answer, reason: str) -> None:
        for dose in self.kept:
            number = self._number_of(dose)
            self.tried[number] = replace(self.tried[number], answer=answer, reason=reason)
        self.kept = []
        self.times.pairs.pop(TOGETHER, None)

    # -- progress and records

    def _say(self, what: str) -> None:
        """Report what is running, how far it is, and what is kept so far."""
        kept = f" · kept: {', '.join(map(str, self.kept))}" if self.kept else ""
        self.on_progress(f"{self._place}{what}{kept}")

    def _note(
        self,
        treatment: Treatment,
        value: Value,
        answer: Answer,
        reason: str,
        gain: Gain | None = None,
    ) -> None:
        if answer == "failed" and self.times.is_up():  # its trial was ended
            answer, reason = "not tried", NO_TIME
        dose = Dose(name=treatment.name, value=value)
        pairs = self.times.pairs.get(str(dose), [])
        self.tried.append(
            Tried(
                name=treatment.name,
                value=value,
                safety=treatment.safety,
                summary=treatment.summary,
                answer=answer,
                reason=reason,
                gain=gain,
                job=self._job_gain(pairs, [dose]),
                in_one_run=str(dose) in self.times.in_run,
            )
        )

    def _job_gain(self, pairs: Pairs, doses: Sequence[Dose]) -> JobGain | None:
        """Return what treatments cost at the start, and gain in an epoch unless their gain begins later."""
        begins_late = any(treatment_of(dose).begins_late for dose in doses)
        return verdict.job_gain_of(pairs, num_steps=None if begins_late else steps_of(self.evidence))

    def _note_untried(self, left_out: Reasons) -> None:
        for dose, reason in left_out:
            self._note(treatment_of(dose), dose.value, "not tried", reason)

    def _number_of(self, dose: Dose) -> int:
        return next(
            i for i, each in enumerate(self.tried) if (each.name, each.value) == (dose.name, dose.value)
        )

    def _kept(self, dose: Dose) -> Kept:
        return keep(self.tried[self._number_of(dose)], checked=self.checks[str(dose)])

    def _proof(self, noise: Gain, total: Gain) -> Proof:
        return Proof(
            ratio=total.ratio,
            low=total.low,
            high=total.high,
            noise_low=noise.low,
            noise_high=noise.high,
            smallest_gain=verdict.smallest_gain(noise),
            loss_envelope=self.numbers.envelope,
            reproducible=self.numbers.reproducible,
            step_s=self.evidence.step_s or 0.0,
            date=datetime.date.today().isoformat(),
        )


def _is_between(value: Value, one: Value, other: Value) -> bool:
    """Return whether a number lies between two others: names of modes have no order."""
    numbers = [each for each in (one, value, other) if isinstance(each, int)]
    return len(numbers) == 3 and numbers in (sorted(numbers), sorted(numbers, reverse=True))


def tune(
    evidence: Evidence,
    command: Sequence[str],
    *,
    module: bool = False,
    allow_lossy: bool = False,
    only: Sequence[str] = (),
    patch: bool = False,
    on_progress: OnProgress = ignore,
    resume: bool = False,
    evidence_path: Path | None = None,
    cluster: RayCluster | None = None,
    within_s: float | None = None,
) -> Tuning:
    """Try every treatment that suits a job, or `only` some; keep those that pay and compute its numbers.

    With `patch`, changes of the source are tried too; no file is written.  A journal keeps finished trials
    until everything is done; `resume` continues from it.  With a `cluster` trials run on its nodes.  Nothing
    is started that would end after `within_s` seconds, what is kept being timed together included.
    """
    wish: dict[str, Any] = {"module": module, "allow_lossy": allow_lossy, "only": list(only), "patch": patch}
    job: dict[str, Any] = {
        "command": list(command),
        **wish,
        "source": hashlib.sha256(source_of(evidence, command).encode()).hexdigest(),
        "started_at": evidence.job.started_at,
        "versions": [evidence.job.python, evidence.job.torch, evidence.job.flatout],
    }
    if cluster is not None:
        job["trials"] = "on a cluster"  # a cluster records pairs as a whole
    journal = Journal(journal_path(tuple(command)), job=job, resume=resume, evidence=evidence_path)
    if resume:
        on_progress(
            f"{journal.num_known} trials are already finished" if journal.num_known else "nothing to resume"
        )
    tuner = Tuner(
        evidence,
        command,
        **wish,
        on_progress=on_progress,
        journal=journal,
        cluster=cluster,
        within_s=within_s,
    )
    with Interrupts():  # SIGTERM leaves no more behind than Ctrl-C
        done = tuner.run()
    journal.close()
    return done
