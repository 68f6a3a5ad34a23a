"""The whole: diagnose, try, keep, drop once, write.

    the job against itself -> each treatment: numbers, then time -> what was kept, each left out once -> all

Treatments are tried one after another on top of those that were kept.  The first question is whether the
numbers are right: it takes one or two runs.  Only then is time measured.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatout.doctor.examine import examine
from flatout.ground.errors import BadInput
from flatout.measure.evidence import Evidence
from flatout.tuner import verdict
from flatout.tuner.results.machine import machine_of
from flatout.tuner.results.prescription import Kept, KeptPatch, Prescription, Proof
from flatout.tuner.treatment import Case, Dose, Treatment, all_treatments, read_dose, treatment_of
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trials import TrialPlan, Trials
from flatout.tuner.verdict import FEWEST_PAIRS, MOST_PAIRS, Gain

BLOCK_S, MOST_BLOCK_STEPS = 0.4, 50
FEWEST_WARMUP = 8
SEEDS = 8
LEAST_LIMIT_S, HANGS = 60.0, 4.0
MOST_SOURCE = 4 << 20

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
    gain: Gain | None = None


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
    ) -> None:
        if evidence.step_s is None:
            raise BadInput("no step of the job was measured", hint="flatout diagnose says what it saw")
        self.evidence, self.command, self.allow_lossy = evidence, tuple(command), allow_lossy
        self.only = {dose.name: dose.value for dose in map(read_dose, only)}
        self.patch, self.on_progress = patch, on_progress
        self.trials = Trials(command, module=module, plan=plan_of(evidence.step_s), on_progress=on_progress)
        self.kept: list[Dose] = []
        self.tried: list[Tried] = []
        self.checks: dict[str, str] = {}  # how the numbers of a treatment were verified

    def run(self) -> Tuning:
        """Try everything; the trials' folder is gone afterwards, whatever happens."""
        with self.trials:
            noise = self._measure_noise()
            for treatment, values in self._candidates():
                self._try(treatment, values)
            self._drop_what_no_longer_pays()
            total = self._total()
        machine = machine_of(self.evidence)
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
            reproducible=self.reproducible,
            total=total,
            prescription=prescription,
            num_trials=self.trials.num_run,
            step_s=self.evidence.step_s or 0.0,
            diff=diff,
        )

    # -- the job itself

    def _measure_noise(self) -> Gain:
        """Run the job against itself: does it repeat, how do times vary, what does rounding do to losses."""
        self.on_progress("the job against itself")
        runs = [self.trials.run([]) for _ in range(2 * FEWEST_PAIRS)]
        for run in runs:
            if reason := verdict.failure(run):
                raise BadInput(
                    f"the job cannot be tuned: {reason}", hint="it must train for some dozens of steps"
                )
        self.plain = runs[0]
        self.reproducible = all(verdict.is_reproducible(self.plain, run) for run in runs[1:])
        nudged = self.trials.run([], nudge=True)
        self.nudged = [run for run in (*runs[1:], nudged) if verdict.failure(run) is None]
        return verdict.gain_of(list(zip(runs[::2], runs[1::2], strict=True)))

    # -- treatments

    def _candidates(self) -> list[tuple[Treatment, Sequence[bool | int | str]]]:
        case = Case(evidence=self.evidence, source=source_of(self.evidence, self.command))
        found = []
        for treatment in all_treatments().values():
            if self.only and treatment.name not in self.only:
                continue
            asked = self.only.get(treatment.name, True)
            values = list(treatment.propose(case)) if asked is True else [asked]
            if treatment.safety == "lossy" and values and not self.allow_lossy:
                self._note(
                    treatment, values[0], "not tried", "it changes the numbers: --allow-lossy tries it"
                )
            elif values:
                found.append((treatment, values))
        order = {"exact": 0, "reordered": 1, "lossy": 2}
        return [*self._patches(), *sorted(found, key=lambda each: order[each[0].safety])]

    def _patches(self) -> list[tuple[Treatment, Sequence[bool | int | str]]]:
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

    def _try(self, treatment: Treatment, values: Sequence[bool | int | str]) -> None:
        """Try the values of a treatment, and keep the best of those that pay."""
        paid: list[tuple[Dose, Gain]] = []
        for value in values:
            dose = Dose(name=treatment.name, value=value)
            if reason := _cannot_be_written([*self.kept, dose]):
                self._note(treatment, value, "not tried", reason)
                continue
            self.on_progress(f"{dose}: numbers")
            reason = self._wrong_numbers(treatment, dose)
            if reason is not None:
                failed = reason.startswith("the script")
                self._note(treatment, value, "failed" if failed else "wrong numbers", reason)
                continue
            self.on_progress(f"{dose}: time")
            try:
                gain = self._gain(self.kept, [*self.kept, dose])
            except _Failed as error:
                self._note(treatment, value, "failed", str(error))
                continue
            if gain.is_kept:
                paid.append((dose, gain))
            elif gain.is_none:
                self._note(treatment, value, "no gain", "it gains less than 3 %", gain)
            else:
                reason = f"{gain.num_pairs} pairs of runs do not settle whether it gains 3 %"
                self._note(treatment, value, "undecided", reason, gain)
        best = max(paid, key=lambda each: each[1].low, default=None)
        for dose, gain in paid:
            if best is not None and dose == best[0]:
                self.kept.append(dose)
                self._note(treatment, dose.value, "kept", self.checks[treatment.name], gain)
            else:
                self._note(treatment, dose.value, "no gain", f"{best[0] if best else ''} gains more", gain)

    def _gain(self, without: Sequence[Dose], with_: Sequence[Dose]) -> Gain:
        """Alternate two arms until the answer is settled."""
        pairs: list[tuple[TrialResult, TrialResult]] = []
        while True:
            order = [without, with_] if len(pairs) % 2 == 0 else [with_, without]
            found = [self.trials.run(doses) for doses in order]
            plain, treated = found if len(pairs) % 2 == 0 else reversed(found)
            if reason := verdict.failure(treated, like=self.plain) or verdict.failure(plain):
                raise _Failed(reason)
            pairs.append((plain, treated))
            gain = verdict.gain_of(pairs)
            if gain.is_settled or len(pairs) >= MOST_PAIRS:
                return gain

    def _wrong_numbers(self, treatment: Treatment, dose: Dose) -> str | None:
        """Why the numbers under a treatment are not the job's; None where they are."""
        doses = [*self.kept, dose]
        if treatment.safety == "lossy":
            return self._too_lossy(doses, treatment)
        treated = self.trials.run(doses, same_random=treatment.name == "compile")
        if reason := verdict.failure(treated, like=self.plain):
            return reason
        only_exact = all(treatment_of(each).safety == "exact" for each in doses)
        if treatment.safety == "exact" and only_exact:
            self.checks[treatment.name] = (
                "losses and gradients are equal bit for bit"
                if self.reproducible
                else "the first gradients are equal bit for bit; the job itself differs from run to run"
            )
            return verdict.differs_exactly(self.plain, treated, reproducible=self.reproducible)
        if reason := verdict.leaves_the_envelope(self.plain, treated, self.nudged):
            return reason
        self.checks[treatment.name] = "gradients as near to 64 bits as the job's, losses as near as rounding"
        return self._compare_with_64_bits(doses)

    def _compare_with_64_bits(self, doses: Sequence[Dose]) -> str | None:
        """Compare the first step, without dropout, of the job, the treated job and the job in 64 bits."""
        paths = [self.trials.folder / f"{name}.safetensors" for name in ("plain", "treated", "exact")]
        for path, given, double in zip(paths, ([], doses, []), (False, False, True), strict=True):
            if path.name == "treated.safetensors" or not path.exists():
                run = self.trials.run(
                    given, first_step=str(path), plain=True, double=double, warmup=1, blocks=1, block_steps=1
                )
                if not path.exists():
                    what = "in 64 bits " if double else ""
                    return f"the first step {what}could not be compared: {run.error or run.ended}"
        return verdict.differs_by_more_than_rounding(*paths)

    def _too_lossy(self, doses: Sequence[Dose], treatment: Treatment) -> str | None:
        """Compare late losses over paired seeds until the answer is settled."""
        pairs: list[tuple[TrialResult, TrialResult]] = []
        for seed in range(SEEDS):
            plain, treated = (self.trials.run(given, seed=seed) for given in (self.kept, doses))
            if reason := verdict.failure(treated, like=self.plain) or verdict.failure(plain):
                return reason
            pairs.append((plain, treated))
            change = verdict.loss_change(pairs)
            if len(pairs) >= FEWEST_PAIRS and change.is_inside:
                self.checks[treatment.name] = f"{change}, over {len(pairs)} seeds"
                return None
        return f"{change}: not inside {verdict.MARGIN:.1%}"

    def _drop_what_no_longer_pays(self) -> None:
        """Leave each kept treatment out once: another may have taken its place."""
        if len(self.kept) < 2:
            return
        for dose in list(self.kept):
            others = [each for each in self.kept if each != dose]
            self.on_progress(f"without {dose}")
            try:
                gain = self._gain(others, self.kept)
            except _Failed:
                continue
            number = next(
                i for i, each in enumerate(self.tried) if (each.name, each.value) == (dose.name, dose.value)
            )
            if gain.high < verdict.LEAST_GAIN or gain.low < 1:
                self.kept = others
                answer, reason = "dropped again", "beside the others it no longer pays"
            else:
                answer, reason = "kept", self.tried[number].reason
            treatment = treatment_of(dose)
            self.tried[number] = _tried(treatment, dose.value, answer, reason, gain)  # type: ignore[arg-type]

    def _total(self) -> Gain | None:
        """What all that is kept gains together; one alone was measured already."""
        if len(self.kept) == 1:
            return next(each.gain for each in self.tried if each.answer == "kept")
        self.on_progress("all that was kept")
        return self._gain([], self.kept) if self.kept else None

    # -- what is told

    def _note(
        self,
        treatment: Treatment,
        value: bool | int | str,
        answer: Answer,
        reason: str,
        gain: Gain | None = None,
    ) -> None:
        self.tried.append(_tried(treatment, value, answer, reason, gain))

    def _kept(self, dose: Dose) -> Kept:
        tried = next(each for each in self.tried if (each.name, each.value) == (dose.name, dose.value))
        gain = tried.gain
        assert gain is not None
        return Kept(
            name=dose.name,
            value=dose.value,
            safety=tried.safety,
            ratio=gain.ratio,
            low=gain.low,
            high=gain.high,
            checked=self.checks[dose.name],
        )

    def _kept_patches(self) -> tuple[tuple[KeptPatch, ...], str]:
        """The patches that were kept, and what they change."""
        doses = [dose for dose in self.kept if dose.name not in all_treatments()]
        if not doses:
            return (), ""
        from flatout.tuner.patches.patch import patched_texts, sha256, show_diff, sites_of

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
            reproducible=self.reproducible,
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


class _Failed(Exception):
    """A trial that cannot be judged."""


def _tried(
    treatment: Treatment, value: bool | int | str, answer: Answer, reason: str, gain: Gain | None
) -> Tried:
    return Tried(
        name=treatment.name,
        value=value,
        safety=treatment.safety,
        summary=treatment.summary,
        answer=answer,
        reason=reason,
        gain=gain,
    )


def plan_of(step_s: float) -> TrialPlan:
    """Choose how many steps a trial runs, by how long one takes."""
    block_steps = min(MOST_BLOCK_STEPS, max(2, round(BLOCK_S / step_s)))
    plan = TrialPlan(warmup=max(FEWEST_WARMUP, block_steps), blocks=5, block_steps=block_steps)
    limit_s = max(LEAST_LIMIT_S, HANGS * plan.num_steps * step_s + LEAST_LIMIT_S)
    return TrialPlan(warmup=plan.warmup, blocks=plan.blocks, block_steps=block_steps, limit_s=limit_s)


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
) -> Tuning:
    """Try every treatment that suits a job, or `only` some; keep those that pay and compute its numbers.

    With `patch` changes of the source are tried, too; no file is written.
    """
    tuner = Tuner(
        evidence,
        command,
        module=module,
        allow_lossy=allow_lossy,
        only=only,
        patch=patch,
        on_progress=on_progress,
    )
    return tuner.run()
