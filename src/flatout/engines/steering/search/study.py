"""The study behind a search: whose trials are whose, and what makes a study the same study.

Trials are asked in *brackets*, which are halved together.  Each trial carries its worker and bracket, and the
sampler is seeded by both: a search that was killed runs its open brackets again over the rows that are kept,
comes to the same decisions, and tells only what had not been told.

A study belongs to a model, vectors, questions and a way to score.  Resuming it with others is refused: rows
of another model would look like results.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.engines.steering.report.record import State, Trial, TrialRecord
from flatout.engines.steering.search.finished_rows import RowLog
from flatout.engines.steering.search.space import Space, read_trial
from flatout.engines.steering.search.storage import create_study
from flatout.ground.codec import fields_of
from flatout.ground.errors import BadInput, import_extra

if TYPE_CHECKING:
    import optuna

WORKER, BRACKET, REASON, RECIPE = "worker", "bracket", "reason", "recipe:"
SamplerName = Literal["tpe", "random", "grid", "cmaes"]
GRID_STRENGTHS = 8  # of a grid, from the lowest to the highest
STARTUP_TRIALS = 16  # drawn at random before the sampler trusts what it has seen
STATES: dict[str, State] = {
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
    "RUNNING": "running",
    "WAITING": "running",
}


def open_study(
    where: str | Path,
    *,
    rows: Path,
    name: str = "steering",
    seed: int = 0,
    worker: str = "0",
    sampler: SamplerName = "tpe",
) -> SearchStudy:
    """Open or begin a study in a journal file or at a URL; finished rows are kept in the folder `rows`."""
    study = create_study(where, name=name)
    return SearchStudy(study, RowLog(rows, worker=worker), seed=seed, worker=worker, sampler=sampler)


class SearchStudy:
    """A study as one worker sees it."""

    def __init__(
        self, study: optuna.Study, rows: RowLog, *, seed: int, worker: str, sampler: SamplerName = "tpe"
    ) -> None:
        self.study, self.rows, self.seed = study, rows, seed
        self._worker, self._sampler = worker, sampler
        self._states: Any = import_extra("optuna.trial", extra="steering").TrialState

    def bind(self, recipe: Mapping[str, str]) -> None:
        """Write down what the study is about, or refuse a study that is about something else."""
        held = self.study.user_attrs
        # A search whose judge raised at its first text: nothing that was answered rests on the recipe.
        is_unanswered = not len(self.rows) and 0 < len(self._mine()) == len(self._trials())
        for part, value in recipe.items():
            known = held.get(RECIPE + part)
            if known is None or is_unanswered:
                self.study.set_user_attr(RECIPE + part, value)
            elif known != value:
                said = f": {known!r}" if part == "score" else ""  # others are hashes
                raise BadInput(
                    f"the study {self.study.study_name!r} was started with another {part}{said}",
                    hint="resume with the same one, or start a study under another name",
                )

    def num_asked(self) -> int:
        """Count the trials of all workers that have a configuration."""
        return sum(read_trial(one.number, one.params) is not None for one in self._trials())

    def open_brackets(self) -> list[list[Trial]]:
        """Return our complete brackets with unfinished trials; fail trials that never started."""
        brackets: dict[int, list[Trial]] = defaultdict(list)
        is_open: set[int] = set()
        for one in self._mine():
            trial, bracket = read_trial(one.number, one.params), one.user_attrs.get(BRACKET)
            if trial is None or bracket is None:
                self._fail_unfinished(one, "ended before it had a configuration")
                continue
            brackets[bracket].append(trial)
            if not one.state.is_finished():
                is_open.add(bracket)
        return [brackets[bracket] for bracket in sorted(is_open)]

    def ask(self, space: Space, count: int) -> list[Trial]:
        """Ask for a bracket of `count` trials; the sampler counts running ones as bad, so they differ."""
        bracket = 1 + max((one.user_attrs.get(BRACKET, -1) for one in self._mine()), default=-1)
        self.study.sampler = self._seeded(bracket, space)
        asked = []
        for _ in range(count):
            one = self.study.ask()
            one.set_user_attr(WORKER, self._worker)
            one.set_user_attr(BRACKET, bracket)
            asked.append(space.suggest(one))
        if (
            self._sampler == "grid"
        ):  # told that its last point is done, it would stop a loop that we do not run
            self.study.sampler = import_extra("optuna.samplers", extra="steering").RandomSampler()
        return asked

    def most_trials(self, space: Space) -> float:
        """Return how many trials differ: of a grid its points."""
        if self._sampler != "grid":
            return math.inf
        return math.prod(len(values) for values in space.grid(strengths=GRID_STRENGTHS).values())

    def report(self, number: int, *, value: float, num_questions: int) -> None:
        """Report an intermediate mean; Optuna keeps the first of a step."""
        held = self._trial(number)
        if not held.state.is_finished() and num_questions not in held.intermediate_values:
            optuna = import_extra("optuna", extra="steering")
            optuna.trial.Trial(self.study, held._trial_id).report(value, num_questions)

    def complete(self, number: int, value: float) -> None:
        """End a trial that has answered every question."""
        if not self._trial(number).state.is_finished():
            self.study.tell(number, value)

    def prune(self, number: int) -> None:
        """End a trial that is not good enough to continue; Optuna keeps its last intermediate mean."""
        if not self._trial(number).state.is_finished():
            self.study.tell(number, state=self._states.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """End a trial that gave no number: it has no value, which is not the value 0."""
        self._fail_unfinished(self._trial(number), reason)

    def best(self) -> tuple[Trial, float] | None:
        """Return the complete trial with the highest mean; the earlier of equals."""
        found: tuple[Trial, float] | None = None
        for one in self._trials():
            trial = read_trial(one.number, one.params)
            if one.state == self._states.COMPLETE and trial is not None and one.value is not None:
                found = (trial, one.value) if found is None or one.value > found[1] else found
        return found

    def counts(self) -> dict[State, int]:
        """Count trials by state: complete, pruned, failed, running."""
        states = [STATES[one.state.name] for one in self._trials()]
        return {state: states.count(state) for state in dict.fromkeys(STATES.values())}

    def records(self) -> tuple[TrialRecord, ...]:
        """Record every trial that has a configuration; a pruned one has its mean over what it was asked."""
        records = []
        for one in self._trials():
            trial = read_trial(one.number, one.params)
            if trial is None:
                continue
            num_questions, score = _last_report(one)
            state = STATES[one.state.name]
            records.append(
                TrialRecord(
                    **fields_of(trial),
                    state=state,
                    score=None if state == "failed" else score,
                    num_questions=num_questions,
                )
            )
        return tuple(records)

    def open_workers(self) -> set[str]:
        """Name the other workers with trials that have not ended."""
        found = {one.user_attrs.get(WORKER) for one in self._trials() if not one.state.is_finished()}
        return {name for name in found if name is not None and name != self._worker}

    def fail_ownerless(self) -> None:
        """Fail the trials whose workers died before they had a configuration."""
        for one in self._trials():
            if WORKER not in one.user_attrs:
                self._fail_unfinished(one, "its worker died before it had a configuration")

    def _fail_unfinished(self, one: optuna.trial.FrozenTrial, reason: str) -> None:
        if not one.state.is_finished():
            optuna = import_extra("optuna", extra="steering")
            optuna.trial.Trial(self.study, one._trial_id).set_user_attr(REASON, reason)
            self.study.tell(one.number, state=self._states.FAIL)

    def _seeded(self, bracket: int, space: Space) -> optuna.samplers.BaseSampler:
        """Make a sampler seeded for the bracket: after a restart it must not draw the first one again."""
        digest = hashlib.sha256(f"{self.seed}:{self._worker}:{bracket}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        samplers: Any = import_extra("optuna.samplers", extra="steering")
        made: optuna.samplers.BaseSampler
        if self._sampler == "random":
            made = samplers.RandomSampler(seed=seed)
        elif self._sampler == "grid":  # points are numbered in one order for all workers
            made = samplers.GridSampler(space.grid(strengths=GRID_STRENGTHS), seed=self.seed)
        elif self._sampler == "cmaes":
            check_cmaes()
            made = samplers.CmaEsSampler(
                seed=seed, n_startup_trials=STARTUP_TRIALS, warn_independent_sampling=False
            )
        else:
            made = samplers.TPESampler(
                seed=seed, n_startup_trials=STARTUP_TRIALS, constant_liar=True, multivariate=True
            )
        return made

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _mine(self) -> list[optuna.trial.FrozenTrial]:
        return [one for one in self._trials() if one.user_attrs.get(WORKER) == self._worker]

    def _trial(self, number: int) -> optuna.trial.FrozenTrial:
        return self._trials()[number]


def check_cmaes() -> None:
    """Say what is missing: Optuna has CMA-ES from another package."""
    if importlib.util.find_spec("cmaes") is None:
        raise BadInput("the sampler cmaes needs the package cmaes", hint="pip install cmaes, or use tpe")


def _last_report(one: optuna.trial.FrozenTrial) -> tuple[int | None, float | None]:
    reported: dict[int, Any] = one.intermediate_values
    if not reported:
        return None, one.values[0] if one.values else None
    step = max(reported)
    return step, float(reported[step])
