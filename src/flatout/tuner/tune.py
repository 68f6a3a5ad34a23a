"""The whole: diagnose, try, keep, drop once, write.

    the job against itself -> what can be switched, all in one run -> each treatment, on top of what was kept
    -> what was kept, each left out once -> all together

Treatments that can be switched are timed first, in alternating blocks of one run, because that is cheap;
those that gain are then asked for their numbers.  For the others numbers come first, with one or two runs,
and time afterwards, in pairs of processes.  What may gain most by the diagnosis goes first.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flatout.doctor.examine import examine
from flatout.ground.documents import show_diff
from flatout.ground.errors import BadInput
from flatout.ground.interrupts import Interrupts
from flatout.hardware.ray_cluster import RayCluster
from flatout.measure.evidence import Evidence
from flatout.measure.run.schedule import steps_per_block
from flatout.tuner import verdict
from flatout.tuner.numbers import Numbers, regroups
from flatout.tuner.results.prescription import Kept, KeptPatch, Prescription, Proof
from flatout.tuner.treatment import Case, Dose, Treatment, all_treatments, read_dose, treatment_of
from flatout.tuner.trial.journal import Journal, journal_path
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trial.on_cluster import ClusterTrials
from flatout.tuner.trial.switched import FEWEST_ROUNDS, LEAST_GAIN, MOST_ROUNDS
from flatout.tuner.trials import TrialPlan, Trials, Unit, hint_of, pair_of
from flatout.tuner.verdict import FEWEST_PAIRS, MOST_PAIRS, Gain, JobGain

BLOCK_S, MOST_BLOCK_STEPS = 0.4, 50
FEWEST_WARMUP = 8
LONG_STEP_S = 2.0  # from here on few steps are enough: a step is worth a block of short ones
BLOCKS_PER_ROUND = 1.6  # of an arm's block: half a block of the baseline, and some that are longer
LEAST_LIMIT_S, HANGS = 180.0, 4.0  # a large model takes a minute or two to compile
MOST_SOURCE = 4 << 20
USABLE, PEAK_FACTOR, CONTEXT_BYTES, CORES_EACH = 0.85, 1.25, 1 << 30, 2  # of trials beside each other

TRIALS_AT_END = 2 * FEWEST_PAIRS + 2  # of all that was kept together; and the one that is under way
BLOCKS_SHARE = 0.25  # of the time that is left, for blocks of one run
NOISE_PAIRS, NOISE_SHARE = 2, 0.25  # of the job against itself: the fewest, and of the time for more of them
ALL_OF_IT = 0.9  # of a measured ceiling: no other value of a treatment is tried
LIKELY_PAIRS = 2  # that a treatment is asked for: most gain nothing, and two show it

NO_TIME = "no time was left for it"
NOISE, TOGETHER = "the job against itself", "everything kept"

Pairs = list[tuple[TrialResult, TrialResult]]  # of runs without and with a treatment
Candidate = tuple[Treatment, Sequence[bool | int | str]]
Answer = Literal["kept", "no gain", "wrong numbers", "failed", "undecided", "not tried", "dropped again"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A treatment and what came of it."""

    name: str
    value: bool | int | str
    safety: str
    summary: str
    answer: Answer
    reason: str
    gain: Gain | None = None  # of the step
    job: JobGain | None = None  # with what it costs at the start
    in_one_run: bool = False  # switched in blocks of one run, not in pairs of runs

    def __str__(self) -> str:
        return str(Dose(name=self.name, value=self.value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What was tried on a job, and what is left of it."""

    tried: tuple[Tried, ...]
    noise: Gain  # the job against itself
    reproducible: bool
    total: Gain | None  # all that was kept against none; None where nothing was
    prescription: Prescription
    num_trials: int
    step_s: float  # of the diagnosed job
    diff: str = ""  # of the patches that were kept
    smallest_gain: float | None = None  # that pairs of runs could show here
    noise_in_run: Gain | None = None  # blocks of one run against themselves
    envelope: float | None = None  # by how much of the loss runs of the job itself differ, at most
    job: JobGain | None = None  # of all that was kept, with what it costs at the start

    def why_nothing(self) -> str:
        """The answer where nothing was kept."""
        untried = sum(each.reason == NO_TIME for each in self.tried)
        if not untried:
            return "No treatment that was tried gains: the script is as fast as these treatments can make it."
        return f"Nothing is proven: there was no time for {untried} of {len(self.tried)} treatments."


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
        on_progress: Callable[[str], None],
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
        self.trials = start(
            command,
            module=module,
            plan=plan_of(evidence.step_s, most_steps=length_of(evidence)),
            on_progress=on_progress,
            journal=journal,
            ranks=evidence.job.world_size,
        )
        self._within_s = math.inf if within_s is None else within_s
        self._ends_s = time.monotonic() + self._within_s
        self._longest_s = 0.0  # that a trial of a pair took
        self._later: Sequence[Candidate] = ()  # that were not tried yet
        self._place = ""  # of the treatment under way, among those that are tried
        self.kept: list[Dose] = []
        self.tried: list[Tried] = []
        self.checks: dict[str, str] = {}  # how the numbers of a treatment were verified
        self.pairs: dict[str, Pairs] = {}  # of runs without and with a treatment, by what was asked
        self._in_run: dict[str, Gain] = {}  # gains of switched treatments
        self._in_run_on: list[Dose] | None = None  # what was kept when they were measured
        self.noise_in_run: Gain | None = None

    def run(self) -> Tuning:
        """Try everything; the trials' folder is gone afterwards, whatever happens."""
        with self.trials:
            noise = self._measure_noise()
            self._try_all(self._patches())
            self._try_all(self._by_ceiling(self._candidates()))
            self._place = ""
            self._drop_what_no_longer_pays()
            total = self._total()
            machine = self.trials.machine(self.evidence)
        kept = tuple(self._kept(dose) for dose in self.kept if dose.name in all_treatments())
        patches, diff = self._kept_patches()
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
            noise_in_run=self.noise_in_run,
            smallest_gain=verdict.smallest_gain(noise),
            envelope=self.numbers.envelope,
            reproducible=self.numbers.reproducible,
            total=total,
            job=verdict.job_gain_of(self.pairs.get(TOGETHER, []), num_steps=steps_of(self.evidence)),
            prescription=prescription,
            num_trials=self.trials.num_run,
            step_s=self.evidence.step_s or 0.0,
            diff=diff,
        )

    # -- the job itself

    def _measure_noise(self) -> Gain:
        """Run the job against itself: does it repeat, how do times vary, what does rounding do to losses."""
        alike = pair_of([], [])
        self.trials.expect("noise", [*[alike] * FEWEST_PAIRS, (((), {"nudge": True}),)])
        pairs = self.pairs[NOISE] = []
        until_s = self._ends_s - (1 - NOISE_SHARE) * self._within_s if self._within_s < math.inf else math.inf
        while len(pairs) < FEWEST_PAIRS and (len(pairs) < NOISE_PAIRS or time.monotonic() < until_s):
            self._say(f"{NOISE}, pair {len(pairs) + 1}")
            pairs.append(self._run_pair([], []))
            for run in pairs[-1]:
                if reason := verdict.failure(run):
                    raise BadInput(f"the job cannot be tuned: {reason}", hint=hint_of(run, self.trials.plan))
        runs = [run for pair in pairs for run in pair]
        self.trials.at_once = at_once(self.evidence, runs)
        precision = self.evidence.precision
        is_half = precision is not None and precision.autocast is not None
        self.numbers = Numbers(self.trials, runs, is_half=is_half)
        return verdict.gain_of(pairs)

    # -- treatments

    def _candidates(self) -> list[Candidate]:
        case = Case(evidence=self.evidence, source=source_of(self.evidence, self.command))
        found: list[Candidate] = []
        for treatment in all_treatments().values():
            if self.only and treatment.name not in self.only:
                continue
            asked = self.only.get(treatment.name, True)
            values = list(treatment.propose(case)) if asked is True else [asked]
            if treatment.safety == "lossy" and values and not self.allow_lossy:
                self._note(
                    treatment, values[0], "not tried", "it changes the numbers; --allow-lossy tries it"
                )
            elif values:
                found.append((treatment, values))
            elif self.only:
                reason = f"nothing in this job calls for it: --only {treatment.name}=VALUE tries it anyway"
                self._note(treatment, True, "not tried", reason)
        return found

    def _patches(self) -> list[Candidate]:
        """Patches of the lines that findings name; they come first, since they change what the rest gains."""
        if not self.patch:
            return []
        from flatout.tuner.patches.patch import all_patches, find_sites

        wanted = {name: value for name, value in self.only.items() if name in all_patches()}
        if self.only and not wanted:
            return []
        can, cannot = find_sites(
            user_files(self.evidence, self.command), examine(self.evidence), folder=Path.cwd(), only=wanted
        )
        for site, reason in cannot:
            self._note(treatment_of(Dose(name=site.patch, value=str(site))), str(site), "not tried", reason)
        return [(treatment_of(Dose(name=site.patch, value=str(site))), [str(site)]) for site in can]

    def _by_ceiling(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that may gain most first: as blocks of one run showed, or as the diagnosis measured."""
        self._switch(_switched(candidates))
        ceilings = ceilings_of(self.evidence)

        def rank(candidate: Candidate) -> tuple[float, int]:
            treatment, values = candidate
            labels = [str(Dose(name=treatment.name, value=value)) for value in values]
            shown = [self._in_run[label].ratio for label in labels if label in self._in_run]
            known = shown or [ceilings.get(rule, 1.0) for rule in treatment.rules]
            if shown and max(shown) < LEAST_GAIN:  # last: others may hold it up
                known = [0.0]
            return -max(known, default=1.0), ("exact", "reordered", "lossy").index(treatment.safety)

        return sorted(candidates, key=rank)

    def _switch(self, doses: Sequence[Dose]) -> None:
        """Measure treatments in alternating blocks of one run, on top of those that were kept."""
        self._in_run_on = list(self.kept)
        for dose in doses:
            self._in_run.pop(str(dose), None)
        if not doses or self.evidence.job.world_size > 1:  # ranks must do the same at the same time
            return
        self._say(f"in one run: {', '.join(map(str, doses))}")
        share = min(self.trials.slots, len(doses))  # one run on each of several nodes
        changes = [self._blocks_of(doses[place::share]) for place in range(share)]
        self.trials.expect("in one run", [((tuple(self.kept), each),) for each in changes])
        for found in [self.trials.run(self.kept, **each) for each in changes]:
            if found.ended not in ("measured", "finished"):  # then each is tried in processes of its own
                continue
            gains, same = verdict.gains_of_arms(found.arms)
            self.noise_in_run = self.noise_in_run or same
            self._in_run |= {
                label: gain
                for label, gain in gains.items()
                if gain.is_none or gain.num_pairs >= FEWEST_ROUNDS
            }

    def _blocks_of(self, doses: Sequence[Dose]) -> dict[str, Any]:
        """What a trial is told to switch these treatments in blocks."""
        return {
            "arms": tuple(doses),
            "seconds": min(
                seconds_for(len(doses) + 1, self.evidence.step_s or 0.0),
                BLOCKS_SHARE * max(0.0, self._ends_s - time.monotonic()),
            ),
        }

    def _try_all(self, candidates: Sequence[Candidate]) -> None:
        for number, (treatment, values) in enumerate(candidates):
            self._later = candidates[number:]
            self._place = f"{number + 1} of {len(candidates)} · "
            if self._is_late():
                self._note(treatment, values[0], "not tried", NO_TIME)
                continue
            for later, doses in candidates[number:]:
                self._expect(later, doses)
            self._try(treatment, values)

    def _is_late(self) -> bool:
        """Whether the time that is left is needed to show what all that was kept gains together."""
        trials = TRIALS_AT_END if self.kept else 2
        return time.monotonic() + trials * self._longest_s > self._ends_s

    def _expect(self, treatment: Treatment, values: Sequence[bool | int | str]) -> None:
        """Tell what the values of a treatment will ask for, if nothing else is kept before."""
        if treatment.safety == "lossy" or (treatment.switch is not None and self._in_run_on != self.kept):
            return
        for dose in (Dose(name=treatment.name, value=value) for value in values):
            gain, doses = self._in_run.get(str(dose)), [*self.kept, dose]
            if (gain is not None and not gain.is_kept) or _cannot_be_written(doses):
                continue
            units: list[Unit] = [((tuple(doses), self.numbers.changes_for(doses)),)]
            if gain is None:
                units += [self._pair(self.kept, doses, number) for number in range(LIKELY_PAIRS)]
            self.trials.expect(str(dose), units)

    def _try(self, treatment: Treatment, values: Sequence[bool | int | str]) -> None:
        """Try the values of a treatment, and keep the best of those that pay."""
        doses = [Dose(name=treatment.name, value=value) for value in values]
        if treatment.switch is not None and self._in_run_on != self.kept:
            self._switch(_switched(self._later))  # what was kept may have held the others up
        ceilings = ceilings_of(self.evidence)
        known = [ceilings[rule] for rule in treatment.rules if rule in ceilings]
        paid: list[tuple[Dose, Gain]] = []
        for number, dose in enumerate(doses):
            if paid and known and paid[-1][1].ratio >= ALL_OF_IT * max(known):
                self._note(
                    treatment, dose.value, "not tried", f"{paid[-1][0]} already gains all that is possible"
                )
                continue
            if number and self._is_late():
                self._note(treatment, dose.value, "not tried", NO_TIME)
                continue
            found = self._try_dose(treatment, dose)
            self.trials.forget(str(dose))
            if found is not None:
                paid.append((dose, found))
        best = max(paid, key=lambda each: each[1].low, default=None)
        for dose, gain in paid:
            if best is not None and dose == best[0]:
                self.kept.append(dose)
                self.trials.forget()  # what was expected lacks this one
                self._note(treatment, dose.value, "kept", self.checks[str(dose)], gain)
            else:
                self._note(treatment, dose.value, "no gain", f"{best[0] if best else ''} gains more", gain)

    def _try_dose(self, treatment: Treatment, dose: Dose) -> Gain | None:
        """What a treatment gains whose numbers are right; else note why it is not kept."""
        if reason := _cannot_be_written([*self.kept, dose]):
            self._note(treatment, dose.value, "not tried", reason)
            return None
        gain = self._in_run.get(str(dose))
        if gain is not None and not gain.is_kept:  # time was cheap to measure, numbers are not
            self._note_gain(treatment, dose, gain)
            return None
        self._say(f"{dose}: numbers")
        judged = self.numbers.judge(treatment, self.kept, dose)
        if not judged.is_right:
            self._note(treatment, dose.value, judged.answer, judged.reason, gain)  # type: ignore[arg-type]
            return None
        self.checks[str(dose)] = judged.reason
        if gain is None:
            try:
                gain = self._gain(self.kept, [*self.kept, dose], label=str(dose))
            except _Failed as error:
                self._note(treatment, dose.value, "failed", str(error))
                return None
        if gain.is_kept:
            return gain
        self._note_gain(treatment, dose, gain)
        return None

    def _note_gain(self, treatment: Treatment, dose: Dose, gain: Gain) -> None:
        if gain.is_none:
            self._note(treatment, dose.value, "no gain", "it gains less than 3 %", gain)
        else:
            what = "blocks" if str(dose) in self._in_run else "pairs"
            reason = f"{gain.num_pairs} {what} do not show whether it gains 3 %"
            self._note(treatment, dose.value, "undecided", reason, gain)

    def _gain(self, without: Sequence[Dose], with_: Sequence[Dose], *, label: str) -> Gain:
        """Alternate two arms, A B B A, until the answer is settled."""
        pairs: Pairs = []
        self.pairs[label] = pairs
        self.trials.expect(label, [self._pair(without, with_, number) for number in range(FEWEST_PAIRS)])
        while True:
            self._say(f"{label}: time, pair {len(pairs) + 1}")
            (first, _), (second, _) = self._pair(without, with_, len(pairs))
            found = self._run_pair(first, second)
            plain, treated = found if len(pairs) % 2 == 0 else reversed(found)
            if regroups([*without, *with_]):
                plain, treated = verdict.by_step(plain), verdict.by_step(treated)
            if reason := verdict.failure(treated, like=plain) or verdict.failure(plain):
                raise _Failed(reason)
            pairs.append((plain, treated))
            gain = verdict.gain_of(pairs)
            is_over = len(pairs) >= FEWEST_PAIRS and time.monotonic() > self._ends_s
            if gain.is_settled or is_over or len(pairs) >= MOST_PAIRS:
                return gain

    def _run_pair(self, first: Sequence[Dose], second: Sequence[Dose]) -> tuple[TrialResult, TrialResult]:
        began_s = time.monotonic()
        found = self.trials.run_pair(first, second)
        self._longest_s = max(self._longest_s, (time.monotonic() - began_s) / 2)
        return found

    def _pair(self, without: Sequence[Dose], with_: Sequence[Dose], number: int) -> Unit:
        return pair_of(without, with_) if number % 2 == 0 else pair_of(with_, without)

    def _drop_what_no_longer_pays(self) -> None:
        """Leave each kept treatment out once: another may have taken its place."""
        if len(self.kept) < 2:
            return
        before = list(self.kept)
        for dose in before:
            if self._is_late() or (dose == before[-1] and self.kept == before):
                return  # what the last one gains was measured beside the others
            others = [each for each in self.kept if each != dose]
            gain = self._gain_beside(dose, others)
            if gain is None:
                continue
            number = self._number_of(dose)
            if gain.high < LEAST_GAIN or gain.low < 1:
                self.kept = others
                answer, reason = "dropped again", "next to the others it gains nothing"
            else:
                answer, reason = "kept", self.tried[number].reason
            self.tried[number] = replace(self.tried[number], answer=answer, reason=reason, gain=gain)  # type: ignore[arg-type]

    def _gain_beside(self, dose: Dose, others: Sequence[Dose]) -> Gain | None:
        """What a treatment gains on top of others; None where that could not be measured."""
        if treatment_of(dose).switch is not None and self.evidence.job.world_size == 1:
            found = self.trials.run(others, **self._blocks_of([dose]))
            gain = verdict.gains_of_arms(found.arms)[0].get(str(dose))
            if gain is not None and gain.is_settled:
                return gain
        try:
            return self._gain(others, self.kept, label=f"without {dose}")
        except _Failed:
            return None
        finally:
            self.trials.forget()

    def _total(self) -> Gain | None:
        """What all that is kept gains together; one alone may have been measured already."""
        if not self.kept:
            return None
        if len(self.kept) == 1 and (known := self.pairs.get(str(self.kept[0]))):
            self.pairs[TOGETHER] = known
            return verdict.gain_of(known)
        try:
            return self._gain([], self.kept, label=TOGETHER)
        except _Failed as error:
            for dose in self.kept:
                number = self._number_of(dose)
                self.tried[number] = replace(self.tried[number], answer="failed", reason=str(error))
            self.kept = []
            return None

    # -- what is told

    def _say(self, what: str) -> None:
        """Say what is under way, how far that is, and what was found by now."""
        kept = f" · kept: {', '.join(map(str, self.kept))}" if self.kept else ""
        self.on_progress(f"{self._place}{what}{kept}")

    def _note(
        self,
        treatment: Treatment,
        value: bool | int | str,
        answer: Answer,
        reason: str,
        gain: Gain | None = None,
    ) -> None:
        dose = Dose(name=treatment.name, value=value)
        pairs = self.pairs.get(str(dose), [])
        self.tried.append(
            Tried(
                name=treatment.name,
                value=value,
                safety=treatment.safety,
                summary=treatment.summary,
                answer=answer,
                reason=reason,
                gain=gain,
                job=verdict.job_gain_of(pairs, num_steps=steps_of(self.evidence)) if pairs else None,
                in_one_run=str(dose) in self._in_run,
            )
        )

    def _number_of(self, dose: Dose) -> int:
        return next(
            i for i, each in enumerate(self.tried) if (each.name, each.value) == (dose.name, dose.value)
        )

    def _kept(self, dose: Dose) -> Kept:
        tried = self.tried[self._number_of(dose)]
        gain = tried.gain
        assert gain is not None
        return Kept(
            name=dose.name,
            value=dose.value,
            safety=tried.safety,
            ratio=gain.ratio,
            low=gain.low,
            high=gain.high,
            checked=self.checks[str(dose)],
            pays_after=tried.job.pays_after if tried.job is not None else None,
        )

    def _kept_patches(self) -> tuple[tuple[KeptPatch, ...], str]:
        """The patches that were kept, and what they change."""
        doses = [dose for dose in self.kept if dose.name not in all_treatments()]
        if not doses:
            return (), ""
        from flatout.tuner.patches.patch import patched_texts, sha256, sites_of

        sites = sites_of(doses)
        texts = patched_texts(sites, folder=Path.cwd())
        kept = []
        for dose, site in zip(doses, sites, strict=True):
            one, sha = self._kept(dose), sha256(texts[site.file][0])
            kept.append(
                KeptPatch(
                    name=one.name,
                    value=str(site),
                    file=site.file,
                    sha256=sha,
                    patched_sha256=sha256(texts[site.file][1]),
                    safety=one.safety,
                    ratio=one.ratio,
                    low=one.low,
                    high=one.high,
                    checked=one.checked,
                )
            )
        return tuple(kept), show_diff(texts)

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


def _cannot_be_written(doses: Sequence[Dose]) -> str | None:
    """Why patches do not go together; None where they do."""
    if all(dose.name in all_treatments() for dose in doses):
        return None
    from flatout.tuner.patches.patch import patched_texts, sites_of
    from flatout.tuner.patches.source import Refused

    try:
        patched_texts(sites_of(doses), folder=Path.cwd())
    except Refused as refusal:
        return str(refusal)
    return None


def _switched(candidates: Sequence[Candidate]) -> list[Dose]:
    """Those that can be measured in blocks of one run."""
    return [
        Dose(name=treatment.name, value=value)
        for treatment, values in candidates
        for value in values
        if treatment.switch is not None
    ]


class _Failed(Exception):
    """A trial that cannot be judged."""


def length_of(evidence: Evidence) -> int | None:
    """The steps of a job that was diagnosed to its end; None where it was cut off."""
    ran_out = evidence.job.ended == "finished" and evidence.steps
    return evidence.steps[-1].index if ran_out else None


def plan_of(step_s: float, *, most_steps: int | None = None) -> TrialPlan:
    """Choose how many steps a trial runs, by how long one takes and how many the job has."""
    block_steps = min(MOST_BLOCK_STEPS, max(2, round(BLOCK_S / step_s)))
    plan = TrialPlan(warmup=max(FEWEST_WARMUP, block_steps), blocks=5, block_steps=block_steps)
    if step_s >= LONG_STEP_S:
        plan = TrialPlan(warmup=3, blocks=3, block_steps=1)
    elif most_steps is not None and plan.num_steps > most_steps:
        warmup = min(plan.warmup, max(3, most_steps // 5))
        block_steps = max(2, (most_steps - warmup - 1) // plan.blocks)
        plan = replace(plan, warmup=warmup, block_steps=block_steps)
    return replace(plan, limit_s=HANGS * plan.num_steps * step_s + LEAST_LIMIT_S)


def at_once(evidence: Evidence, runs: Sequence[TrialResult]) -> int:
    """How many trials may run beside each other on a GPU, where times do not count."""
    gpu, peak = evidence.gpu, max(run.peak_bytes or 0 for run in runs)
    if gpu is None or not gpu.memory_bytes or not peak or evidence.job.world_size > 1:
        return 1
    fit = int(USABLE * gpu.memory_bytes / (PEAK_FACTOR * peak + CONTEXT_BYTES))
    return max(1, min(fit, round(evidence.host.cores or 1) // CORES_EACH))


def seconds_for(num_arms: int, step_s: float) -> float:
    """Return the longest time that blocks of this many arms take in one run."""
    return BLOCKS_PER_ROUND * num_arms * MOST_ROUNDS * steps_per_block(step_s) * step_s


def ceilings_of(evidence: Evidence) -> dict[str, float]:
    """The largest measured ceiling of each rule that found something, by its name."""
    found: dict[str, float] = {}
    for finding in examine(evidence):
        if finding.ceiling is not None:
            found[finding.name] = max(found.get(finding.name, 1.0), finding.ceiling.speedup)
    return found


def steps_of(evidence: Evidence) -> int | None:
    """The steps of an epoch; None where no loader says how many there are."""
    loaders = [loader for loader in evidence.loaders if loader.trains and loader.num_batches]
    per_step = max((step.num_batches for step in evidence.steps), default=1)
    return (loaders[0].num_batches or 0) // max(1, per_step) or None if loaders else None


def user_files(evidence: Evidence, command: Sequence[str]) -> list[str]:
    """The script, and the user's files that the evidence names."""
    paths = {name: Path(os.getcwd(), name) for name in sorted({*evidence.sources, command[0]})}
    return [name for name, path in paths.items() if path.is_file() and path.stat().st_size <= MOST_SOURCE]


def source_of(evidence: Evidence, command: Sequence[str]) -> str:
    """The text of these files."""
    paths = [Path(os.getcwd(), name) for name in user_files(evidence, command)]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def tune(
    evidence: Evidence,
    command: Sequence[str],
    *,
    module: bool = False,
    allow_lossy: bool = False,
    only: Sequence[str] = (),
    patch: bool = False,
    on_progress: Callable[[str], None] = lambda message: None,
    resume: bool = False,
    evidence_path: Path | None = None,
    cluster: RayCluster | None = None,
    within_s: float | None = None,
) -> Tuning:
    """Try every treatment that suits a job, or `only` some; keep those that pay and compute its numbers.

    With `patch` changes of the source are tried, too; no file is written.  Finished trials stand in a journal
    until all is done; `resume` goes on with it.  With a `cluster` they run on its nodes.  After `within_s`
    seconds nothing more is tried.
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
        job["trials"] = "on a cluster"  # where pairs are written down as a whole
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
    with Interrupts():  # a polite kill leaves no more behind than Ctrl-C
        done = tuner.run()
    journal.close()
    return done
