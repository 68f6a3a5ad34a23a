"""Does a treated job compute what the job does?  Run what the comparison needs, and ask for the verdict.

A treatment is compared with the job under the lossy treatments kept before it: their changes have already
been judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flatout.tuner import verdict
from flatout.tuner.treatment import Dose, Treatment, treatment_of
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trials import TrialRun, Trials
from flatout.tuner.verdict import FEWEST_PAIRS

SEEDS = 8
TRIALS_OF_LOSSY = 2 + 2 * FEWEST_PAIRS  # of a lossy treatment, at least: two first steps, and pairs of seeds
NUDGED = {"nudge": True}
WITHOUT_DROPOUT = {"plain": True}
FIXED = "fixed_samples"
EXACT = "exact"
FIRST_STEPS = ("plain", "treated", EXACT)  # that are compared; the last in 64 bits
ROOM_FOR_64_BITS = 3  # as many trials at once leave room for one that takes twice the memory, and another
COMPILES = ("compile",)  # treatments whose code draws its own random numbers

Pair = tuple[TrialResult, TrialResult]  # without and with a treatment, of one seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What was found about the numbers, and how."""

    answer: Literal["right", "wrong numbers", "failed", "undecided"]
    reason: str

    @property
    def is_right(self) -> bool:
        return self.answer == "right"


def _wrong(reason: str) -> Judgement:
    failed = reason.startswith(("the script raised", "the script did not", "the script ended"))
    return Judgement(answer="failed" if failed else "wrong numbers", reason=reason)


def _right(reason: str) -> Judgement:
    return Judgement(answer="right", reason=reason)


def of_seed(seed: int) -> dict[str, Any]:
    """Return the options of a lossy trial: some dozens of losses do not show a stale batch."""
    return {"seed": seed, "all_batches": True}


def regroups(doses: Sequence[Dose]) -> bool:
    """Return whether a step's samples form other batches under these treatments."""
    return any(treatment_of(dose).regroups for dose in doses)


def needs_no_dropout(doses: Sequence[Dose]) -> bool:
    """Return whether dropout draws other masks under these treatments, so that losses differ by chance."""
    return regroups(doses) or any(treatment_of(dose).redraws_masks for dose in doses)


def changes_for(doses: Sequence[Dose], *, draws: bool | None) -> dict[str, Any] | None:
    """Return what to change in a trial whose numbers are compared; None if that is not known yet.

    Code that draws as eager code does is compiled anew, so only a job that draws random numbers asks for it.
    """
    is_compiled = any(dose.name in COMPILES for dose in doses)
    if is_compiled and draws is None:
        return None
    return {"same_random": is_compiled and draws, **(WITHOUT_DROPOUT if needs_no_dropout(doses) else {})}


NEVER_ALIKE = (
    "nothing can be verified: the job itself reads other numbers in each run; seed what it draws, such as an "
    "environment"
)


class Numbers:
    """Judges the numbers of one job's treatments."""

    def __init__(
        self,
        trials: Trials,
        runs: Sequence[TrialResult],
        *,
        nudged: TrialResult | None = None,
        is_half: bool = False,
        by_step: bool = False,
    ) -> None:
        """Take the `runs` of the job against itself, and with its last bit changed if there is one.

        With `by_step`, compare without dropout.
        """
        self.trials, self._is_by_step = trials, by_step
        self._ahead: list[tuple[TrialRun, TrialResult]] = []  # ran beside others, before it was asked for
        self.plain = runs[0]
        self.reproducible = all(verdict.is_reproducible(self.plain, run) for run in runs[1:])
        self.begins_alike = all(verdict.repeats_first_step(self.plain, run) for run in runs[1:])
        self._is_half = is_half or any(each in verdict.HALF for each in self.plain.formats)
        self._lossy: tuple[Dose, ...] = ()  # of the kept treatments
        self._others = list(runs[1:])
        self._keep_nudged(nudged if nudged is not None else self._run_all([((), NUDGED)])[0])
        self._first: dict[str, tuple[Path, TrialResult]] = {}
        self._bases: dict[tuple[Dose, ...], TrialResult] = {}
        self._by_step: Numbers | None = None  # for treatments that split a step into other batches

    @property
    def envelope(self) -> float:
        """How far losses of the job's own runs differ, as a share of the loss, also after a last bit."""
        return max(
            abs(other - one) / max(abs(one), 1e-12)
            for run in self.nudged
            for one, other in zip(self.plain.losses, run.losses, strict=False)
        )

    def judge(self, treatment: Treatment, kept: Sequence[Dose], dose: Dose) -> Judgement:
        """Compare the job under `kept` and `dose` with the job."""
        if not self._is_by_step and needs_no_dropout([*kept, dose]):
            judged = self._numbers_by_step().judge(treatment, kept, dose)
            return replace(judged, reason=f"without dropout, {judged.reason}") if judged.is_right else judged
        judged = self._judge(treatment, kept, dose)
        if treatment.redraws and judged.is_right and FIXED in self.trials.always:
            return _right(f"with the random numbers of each sample fixed: {judged.reason}")
        return judged

    def _numbers_by_step(self) -> Numbers:
        """Return a judge that compares the sums of each step's losses, without dropout and its masks."""
        if self._by_step is None:
            runs = self.trials.run_all([((), WITHOUT_DROPOUT)] * 2)
            self._by_step = Numbers(
                self.trials, [verdict.by_step(run) for run in runs], is_half=self._is_half, by_step=True
            )
        return self._by_step

    def _judge(self, treatment: Treatment, kept: Sequence[Dose], dose: Dose) -> Judgement:
        doses = [*kept, dose]
        if treatment.safety == "lossy":
            return self._judge_lossy(treatment, kept, doses)
        lossy = tuple(each for each in kept if treatment_of(each).safety == "lossy")
        self._run_beside(self._asked_of(treatment, doses, lossy))
        self._refer_to(lossy)
        treated = self._run(doses)
        redraws = treatment.redraws and FIXED not in self.trials.always
        if redraws and verdict.serves_other_batches(self.plain, treated):
            return self._judge_with_fixed_samples(treatment, kept, dose)
        if reason := self._works_otherwise(doses, treated):
            return _wrong(reason)
        if treatment.safety == "exact" and (found := self._judge_exact(kept, treated)) is not None:
            return found
        if reason := verdict.leaves_the_envelope(self.plain, treated, self.nudged):
            return _wrong(reason)
        if reason := verdict.changes_other_weights(self.plain, treated, self.nudged):
            return _wrong(reason)
        if reason := self._compare_with_64_bits(doses):
            return _wrong(reason)
        return _right("gradients are as close to 64 bits as the job's, and losses differ only by rounding")

    def _judge_with_fixed_samples(self, treatment: Treatment, kept: Sequence[Dose], dose: Dose) -> Judgement:
        """Judge with random numbers fixed per sample: other processes draw others; the rest must be equal.

        If it is, later trials draw alike too.
        """
        before = dict(vars(self))
        self.trials.always, self._ahead = {FIXED: True}, []
        doses = [*kept, dose]
        self._run_beside([*self._references(self._lossy), (doses, self.changes_for(doses))])
        self._refer_again()
        judged = self._judge(treatment, kept, dose)
        if not judged.is_right:
            self.trials.always = {}
            vars(self).update(before)
        return judged

    def _judge_exact(self, kept: Sequence[Dose], treated: TrialResult) -> Judgement | None:
        """Compare bit for bit; None if the job's own runs or kept treatments allow only for rounding."""
        if not self.reproducible:
            if not self.begins_alike or any(treatment_of(each).safety != "exact" for each in kept):
                return None
            if reason := verdict.differs_at_first(self.plain, treated):
                return _wrong(reason)
            if reason := verdict.leaves_the_envelope(self.plain, treated, self.nudged):
                return _wrong(reason)
            return _right("the first step is equal bit for bit; the job itself differs from run to run")
        only_exact = all(treatment_of(each).safety == "exact" for each in kept)
        base = self.plain if only_exact else self._base(kept)
        reason = verdict.differs_exactly(base, treated)
        if reason is None:
            return _right("batches, losses, gradients and parameters are equal bit for bit")
        return _wrong(reason) if only_exact else None

    def _base(self, kept: Sequence[Dose]) -> TrialResult:
        """Return the job under the kept treatments."""
        if tuple(kept) not in self._bases:
            self._bases[tuple(kept)] = self._run(kept)
        return self._bases[tuple(kept)]

    def _works_otherwise(self, doses: Sequence[Dose], treated: TrialResult) -> str | None:
        if reason := verdict.failure(treated, like=self.plain):
            return reason
        given = [treatment_of(dose) for dose in doses]
        if not any(each.changes_batches for each in given) and (
            reason := verdict.serves_other_batches(self.plain, treated)
        ):
            return reason
        if any(each.moves_reads for each in given):
            return None
        reason = verdict.reads_other_losses(self.plain, treated)
        if reason is not None and any(verdict.reads_other_losses(self.plain, run) for run in self._others):
            return NEVER_ALIKE
        return reason

    def _run(self, doses: Sequence[Dose]) -> TrialResult:
        return self._run_all([(doses, self.changes_for(doses))])[0]

    def _run_all(self, runs: Sequence[TrialRun]) -> list[TrialResult]:
        known = [self._take(run) for run in runs]
        left = iter(self._run_now([run for run, found in zip(runs, known, strict=True) if found is None]))
        return [next(left) if found is None else found for found in known]

    def _run_now(self, runs: Sequence[TrialRun]) -> list[TrialResult]:
        if not runs:
            return []
        if not self._is_by_step:
            return self.trials.run_all(runs)
        found = self.trials.run_all([(doses, {**changes, **WITHOUT_DROPOUT}) for doses, changes in runs])
        return [verdict.by_step(run) for run in found]

    def _run_beside(self, runs: Sequence[TrialRun]) -> None:
        """Run what will be asked for beside each other, if that takes less time than one after the other."""
        if self.trials.at_once > 1:
            self._ahead = list(zip(runs, self._run_all(runs), strict=True))

    def _take(self, asked: TrialRun) -> TrialResult | None:
        """Return the result of what ran ahead, once; None if it did not."""
        for place, ((doses, changes), found) in enumerate(self._ahead):
            if (list(doses), changes) == (list(asked[0]), asked[1]):
                del self._ahead[place]
                return found
        return None

    def _asked_of(
        self, treatment: Treatment, doses: Sequence[Dose], lossy: tuple[Dose, ...]
    ) -> list[TrialRun]:
        """Return the runs that a comparison most likely needs; one in 64 bits takes the memory of two."""
        refers = lossy != self._lossy
        runs = self._references(lossy) if refers else []
        runs.append((doses, self.changes_for(doses)))
        if treatment.safety == "exact" and (refers or self.reproducible or self.begins_alike):
            return runs
        names = [name for name in FIRST_STEPS if refers or name == "treated" or name not in self._first]
        if self.trials.at_once < ROOM_FOR_64_BITS and EXACT in names:
            names.remove(EXACT)
        for name in names:
            self._path_of(name).unlink(missing_ok=True)
        return runs + [self._first_step_run(name, doses if name == "treated" else lossy) for name in names]

    def changes_for(self, doses: Sequence[Dose]) -> dict[str, Any]:
        """Return what to change in a trial whose numbers are compared."""
        return changes_for(doses, draws=self.plain.draws) or {}

    # -- what it is compared with

    def _refer_to(self, lossy: tuple[Dose, ...]) -> None:
        """Take the job under these lossy treatments as the reference."""
        if lossy != self._lossy:
            self._lossy, self._is_half = lossy, True
            self._refer_again()

    def _references(self, lossy: tuple[Dose, ...]) -> list[TrialRun]:
        again = (lossy, self.changes_for(lossy))
        return [again, again, (lossy, NUDGED)]

    def _refer_again(self) -> None:
        self._first, self._bases = {}, {}
        self.plain, other, nudged = self._run_all(self._references(self._lossy))
        self._others = [other]
        self.reproducible = verdict.is_reproducible(self.plain, self._others[0])
        self.begins_alike = verdict.repeats_first_step(self.plain, self._others[0])
        self._keep_nudged(nudged)

    def _keep_nudged(self, nudged: TrialResult) -> None:
        self.nudged = [run for run in (*self._others, nudged) if verdict.failure(run) is None]

    def _compare_with_64_bits(self, doses: Sequence[Dose]) -> str | None:
        """Compare the first step, without dropout, of the job, the treated job and the job in 64 bits."""
        self._first.pop("treated", None)
        given = {name: doses if name == "treated" else self._lossy for name in FIRST_STEPS}
        given = {name: each for name, each in given.items() if name not in self._first}
        found = self._first_steps({name: each for name, each in given.items() if name != EXACT})
        found |= self._first_steps({name: each for name, each in given.items() if name == EXACT})
        for name, (path, run) in found.items():
            what = "in 64 bits " if name == EXACT else ""
            if not path.exists():
                if run.ended == "killed":  # by a limit of time, perhaps: nothing was compared
                    return f"the script {run.error}"
                return f"the first step {what}could not be compared: {run.error or run.ended}"
            plain = {**self._first, **found}["plain"][1]
            if name != "plain" and (reason := verdict.starts_otherwise(plain, run)):
                return f"the first step {what}could not be compared: {reason}"
            self._first[name] = path, run
        paths = [self._first[name][0] for name in ("plain", "treated", "exact")]
        return verdict.differs_by_more_than_rounding(paths[0], paths[1], paths[2], is_half=self._is_half)

    def _first_steps(self, given: dict[str, Sequence[Dose]]) -> dict[str, tuple[Path, TrialResult]]:
        """Run first steps without dropout, by name; return their files and results."""
        asked = {name: self._first_step_run(name, doses) for name, doses in given.items()}
        for name, run in asked.items():
            if not any(run == known for known, _ in self._ahead):
                self._path_of(name).unlink(missing_ok=True)
        found = self._run_all(list(asked.values()))
        return {name: (self._path_of(name), run) for name, run in zip(asked, found, strict=True)}

    def _first_step_run(self, name: str, doses: Sequence[Dose]) -> TrialRun:
        return doses, {"first_step": str(self._path_of(name)), "plain": True, "double": name == EXACT}

    def _path_of(self, name: str) -> Path:
        return self.trials.folder / f"{name}.safetensors"

    # -- lossy

    def _judge_lossy(self, treatment: Treatment, kept: Sequence[Dose], doses: Sequence[Dose]) -> Judgement:
        """Compare the first step, then late losses over paired seeds until the answer is settled."""
        both = {"before": kept, "lossy": doses}
        self._run_beside(
            [self._first_step_run(name, given) for name, given in both.items()]
            + [(given, of_seed(seed)) for seed in range(FEWEST_PAIRS) for given in both.values()]
        )
        first = self._first_steps(both)
        if reason := _steps_otherwise(first):
            return _wrong(reason)
        without_dropout = first["before"][1], first["lossy"][1]
        pairs: list[Pair] = []
        asked = [((tuple(given), of_seed(seed)),) for seed in range(SEEDS) for given in (kept, doses)]
        self.trials.expect(str(doses[-1]), asked)
        for plain, treated in self._paired_seeds(kept, doses):
            if reason := verdict.failure(plain) or verdict.failure(treated, like=plain):
                return _wrong(reason)
            if not treatment.changes_batches and (reason := verdict.serves_other_batches(plain, treated)):
                return _wrong(reason)
            if not treatment.moves_reads and (reason := verdict.reads_other_losses(plain, treated)):
                return _wrong(reason)
            if not pairs and (reason := verdict.drops_nothing((plain, treated), without_dropout)):
                return _wrong(reason)
            pairs.append((plain, treated))
            if (found := _judge_losses(pairs)) is not None:
                return found
            may_be_masks = verdict.loss_change(pairs).may_be_chance
            if may_be_masks and verdict.has_dropout(pairs[0][0], without_dropout[0]):
                return self._judge_without_dropout(kept, doses, pairs)
        return _undecided(pairs)

    def _judge_without_dropout(
        self, kept: Sequence[Dose], doses: Sequence[Dose], with_dropout: Sequence[Pair]
    ) -> Judgement:
        """Compare late losses without dropout: other formats draw other masks, whose noise hides the rest."""
        pairs: list[Pair] = []
        for plain, treated in self._paired_seeds(kept, doses, **WITHOUT_DROPOUT):
            if reason := verdict.failure(plain) or verdict.failure(treated, like=plain):
                return _wrong(reason)
            pairs.append((plain, treated))
            if (found := _judge_losses(pairs)) is not None:
                if found.is_right and (reason := verdict.drops_less(with_dropout, pairs)):
                    return _wrong(reason)
                return replace(found, reason=f"without dropout, {found.reason}")
        found = _undecided(pairs)
        return replace(found, reason=f"without dropout, {found.reason}")

    def _paired_seeds(self, kept: Sequence[Dose], doses: Sequence[Dose], **changes: Any) -> Iterator[Pair]:
        """Run without and with a treatment, seed by seed; as many at once as may run beside each other.

        Fewer pairs than the fewest decide nothing, so they run first.
        """
        num_at_once, begins = max(1, self.trials.at_once // 2), 0
        while begins < SEEDS:
            num = num_at_once if begins or self.trials.at_once == 1 else FEWEST_PAIRS
            seeds = range(begins, min(SEEDS, begins + num))
            begins = seeds.stop
            runs = self._run_all(
                [(given, {**of_seed(seed), **changes}) for seed in seeds for given in (kept, doses)]
            )
            yield from zip(runs[::2], runs[1::2], strict=True)


def _judge_losses(pairs: Sequence[Pair]) -> Judgement | None:
    """Judge the late losses of paired seeds; None if more seeds are needed."""
    change = verdict.loss_change(pairs)
    if change.is_inside and verdict.seeds_matter([plain for plain, _ in pairs]):
        return _right(str(change))
    return _wrong(str(change)) if change.is_outside else None


def _undecided(pairs: Sequence[Pair]) -> Judgement:
    if not verdict.seeds_matter([plain for plain, _ in pairs]):
        return Judgement(answer="undecided", reason="the job is the same with every seed")
    change = verdict.loss_change(pairs)
    return Judgement(answer="undecided", reason=f"{change}: the margin is {verdict.MARGIN:.1%}")


def _steps_otherwise(found: dict[str, tuple[Path, TrialResult]]) -> str | None:
    for path, run in found.values():
        if not path.exists():
            return f"the script {run.error}" if run.ended == "killed" else f"the script raised {run.error}"
    (before, plain), (lossy, treated) = found.values()
    return verdict.starts_otherwise(plain, treated) or verdict.steps_otherwise(before, lossy)
