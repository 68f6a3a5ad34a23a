"""Which layer, method, strength and place: a search whose trials share their batches.

    ask a bracket -> (trial, question) rows of a rung, packed -> report, prune -> next rung -> tell -> ask ...

Optuna proposes and keeps; the rows of all trials of a bracket run together, and successive halving ends the
poor ones inside the batch.  Every finished row is kept at once, so that a killed search goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flatout.engines.steering.questions import Question
from flatout.engines.steering.report.record import Trial
from flatout.engines.steering.search.finished_rows import FinishedRow
from flatout.engines.steering.search.halving import Bracket, Halving, RungOver
from flatout.engines.steering.search.space import Space, steering_of
from flatout.engines.steering.search.study import SearchStudy
from flatout.engines.steering.trials.scoring import OnScore, Score, Scorer
from flatout.engines.steering.trials.steering import Steering
from flatout.engines.steering.trials.trial_engine import TrialEngine
from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from flatout.engines.steering.vectors.steering_vectors import SteeringVectors

Kind = Literal[
    "extracted", "round", "started", "resumed", "row", "rung", "pruned", "complete", "failed", "retested"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened; `trial` is None for the unsteered model.

    `value` is a row's value, or a trial's mean over the `num_questions` it has answered; None if it has none.
    `num_done` of `num_total` are texts that were extracted, or, as a round of trials begins, the trials of
    all workers that have ended.
    """

    kind: Kind
    trial: Trial | None = None
    value: float | None = None
    num_questions: int | None = None
    num_done: int | None = None
    num_total: int | None = None


OnEvent = Callable[[Event], None]


class HalvedSearch:
    """Brackets of trials over one model: every worker of a study runs one of these."""

    def __init__(
        self,
        engine: TrialEngine,
        vectors: Mapping[str, SteeringVectors],
        questions: Sequence[Question],
        *,
        study: SearchStudy,
        scorer: Scorer,
        space: Space | None = None,
        halving: Halving | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._engine, self._vectors, self.study, self._scorer = engine, vectors, study, scorer
        self._space = space or Space.of(vectors)
        self._halving = halving or Halving()
        self.on_event = on_event or (lambda event: None)
        # One order for all trials, so that their means over the first questions are paired.
        self.questions = sorted(
            {question.key: question for question in questions}.values(),
            key=lambda question: hashlib.sha256(f"{study.seed}:{question.key}".encode()).digest(),
        )
        self._halving.ladder(len(self.questions))
        self._steerings: dict[int, Steering] = {}

    def recipe(self) -> dict[str, str]:
        """Name what results depend on, in addition to model and tokenizer."""
        digest = hashlib.sha256()
        for method, held in sorted(self._vectors.items()):
            digest.update(f"{method} {held.layers}".encode())
            digest.update(held.values.float().cpu().contiguous().numpy().tobytes())
            digest.update(held.norms.float().cpu().contiguous().numpy().tobytes())
        asked = json.dumps([question.key for question in self.questions])
        return {
            "set of vectors": digest.hexdigest()[:32],
            "set of questions": hashlib.sha256(asked.encode()).hexdigest()[:32],
            "space": str(self._space),
            "halving": str(self._halving),
            **self._scorer.recipe(),
        }

    def run(self, *, trials: int, batch_trials: int = 16) -> None:
        """Finish what is open, then ask until the study has `trials` trials of all workers."""
        if trials < 1 or batch_trials < 1:
            raise BadInput(f"trials={trials}, batch_trials={batch_trials}", hint="give at least 1 of each")
        trials = int(min(trials, self.study.most_trials(self._space)))
        for bracket in self.study.open_brackets():
            self._tell_round(trials)
            for trial in bracket:
                self.on_event(Event(kind="resumed", trial=trial))
            self._run_bracket(bracket)
        while (left := trials - self.study.num_asked()) > 0:
            asked = self.study.ask(self._space, min(left, batch_trials))
            self._tell_round(trials)
            for trial in asked:
                self.on_event(Event(kind="started", trial=trial))
            self._run_bracket(asked)

    def _tell_round(self, trials: int) -> None:
        counts = self.study.counts()
        ended = sum(number for state, number in counts.items() if state != "running")
        self.on_event(Event(kind="round", num_done=ended, num_total=max(trials, sum(counts.values()))))

    def _run_bracket(self, trials: Sequence[Trial]) -> None:
        """Climb rungs until every trial has ended; rows that are kept from before are not run again."""
        by_number = {trial.number: trial for trial in trials}
        bracket = Bracket(list(by_number), num_questions=len(self.questions), halving=self._halving)
        while not bracket.is_over:
            rows = [(by_number[number], question) for number, question in bracket.pending()]
            self._answer(rows, bracket)
            for number, trial in by_number.items():
                if bracket.state(number) == "failed" and number in self._steerings:
                    self.study.fail(number, "a question gave no finite value")
                    self.on_event(
                        Event(kind="failed", trial=trial, num_questions=bracket.num_answered(number))
                    )
                    del self._steerings[number]
            over = bracket.advance()
            if over is not None:
                self._tell(over, by_number)

    def _answer(self, rows: Sequence[tuple[Trial, int]], bracket: Bracket) -> None:
        """Give the bracket every row's value, from the log or from the model."""

        def answered(place: int, score: Score) -> None:
            trial, question = rows[place]
            value = math.nan if score.value is None else score.value
            bracket.answer(trial.number, question, value)
            self.on_event(Event(kind="row", trial=trial, value=score.value))

        self._ask([(trial, self.questions[question]) for trial, question in rows], answered)

    def _ask(self, rows: Sequence[tuple[Trial | None, Question]], on_score: OnScore) -> None:
        """Answer every row once: from the log, or else through the engine and into the log."""
        log = self.study.rows
        missing: list[int] = []
        for place, (trial, question) in enumerate(rows):
            held = log.find(None if trial is None else trial.number, question.key)
            if held is None:
                missing.append(place)
            else:
                on_score(place, Score(value=held.value, text=held.text))

        def scored(number: int, score: Score) -> None:
            trial, question = rows[missing[number]]
            finished = FinishedRow(
                trial=None if trial is None else trial.number,
                question=question.key,
                value=score.value,
                text=score.text,
            )
            log.add(finished)
            on_score(missing[number], score)

        wanted = [(None if trial is None else self._steering(trial), question) for trial, question in rows]
        if missing:
            self._scorer.score(self._engine, [wanted[place] for place in missing], on_score=scored)

    def _steering(self, trial: Trial) -> Steering:
        """Make one object for each trial: rows that share it are one trial to the engine."""
        if trial.number not in self._steerings:
            self._steerings[trial.number] = steering_of(trial, self._vectors)
        return self._steerings[trial.number]

    def _tell(self, over: RungOver, by_number: Mapping[int, Trial]) -> None:
        for number, mean in over.means.items():
            self.study.report(number, value=mean, num_questions=over.num_questions)
            kind: Kind = "rung" if number in over.kept else "pruned" if number in over.pruned else "complete"
            if kind == "pruned":
                self.study.prune(number)
            elif kind == "complete":
                self.study.complete(number, mean)
            if kind != "rung":
                del self._steerings[number]
            self.on_event(
                Event(kind=kind, trial=by_number[number], value=mean, num_questions=over.num_questions)
            )

    def values(self, trial: Trial | None, questions: Sequence[Question]) -> list[float] | None:
        """Return the values of all questions, in their order; None if one gave no number."""
        values: dict[int, float | None] = {}
        self._ask(
            [(trial, question) for question in questions],
            lambda place, score: values.__setitem__(place, score.value),
        )
        found = [value for place in range(len(questions)) if (value := values[place]) is not None]
        return found if len(found) == len(questions) else None

    def refuse_all_failed(self) -> None:
        """Raise where every trial of the study has failed: there is no winner to test."""
        counts = self.study.counts()
        if counts["failed"] and counts["failed"] == sum(counts.values()):
            raise BadInput(
                f"all {counts['failed']} trials failed: {self._scorer.refusal or 'no row gave a number'}",
                hint="fix it and start a study in another --out; every row is kept",
            )

    def cost_share(self) -> float | None:
        """Return the share of rows run, of asking every trial every question."""
        asked, log = self.study.num_asked(), self.study.rows
        log.reload()
        run = sum(
            log.find(one.number, question.key) is not None
            for one in self.study.study.get_trials(deepcopy=False)
            for question in self.questions
        )
        return run / (asked * len(self.questions)) if asked else None
