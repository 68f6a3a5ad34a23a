"""Which layer, method, strength and place: a search whose trials share their batches.

    ask a bracket -> (trial, question) rows of a rung, packed -> report, prune -> next rung -> tell -> ask ...

Optuna proposes and keeps; the rows of all trials of a bracket run together, and successive halving ends the
poor ones inside the batch.  Every finished row is kept at once, so that a killed search goes on where it was.
At the end the winner and the unsteered model meet questions that the search has not seen.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from flatout.engines.run.fingerprint import model_fingerprint, tokenizer_fingerprint
from flatout.engines.steering.extract.tokens import encode
from flatout.engines.steering.questions import Question
from flatout.engines.steering.report.record import Retest
from flatout.engines.steering.search.finished_rows import FinishedRow
from flatout.engines.steering.search.halving import Bracket, Halving, RungOver
from flatout.engines.steering.search.retest import SideEffects, retest, side_effects
from flatout.engines.steering.search.space import Space, steering_of
from flatout.engines.steering.search.space import Trial as Trial
from flatout.engines.steering.search.study import SearchStudy
from flatout.engines.steering.trials.packed_trials import PackedTrials
from flatout.engines.steering.trials.scoring import MultipleChoice, Score, Scorer
from flatout.engines.steering.trials.steering import Steering
from flatout.errors import BadInput

if TYPE_CHECKING:
    from torch import nn

    from flatout.engines.steering.vectors.steering_vectors import SteeringVectors

TOKENS_PER_ROW = 32  # of a batch of answers; prompts are shared, so a row is a few tokens
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What came of a search; `best` is None if no trial came through all questions."""

    best: Trial | None
    best_value: float | None
    baseline_value: float | None
    counts: Mapping[str, int]  # trials by state
    cost_share: float | None  # rows run, of asking every trial every question
    retest: Retest | None
    side_effects: SideEffects | None


class Search:
    """A search over one model: `run` is what every worker does, `conclude` what one does at the end."""

    def __init__(
        self,
        engine: PackedTrials,
        vectors: Mapping[str, SteeringVectors],
        questions: Sequence[Question],
        *,
        study: SearchStudy,
        scorer: Scorer,
        space: Space | None = None,
        halving: Halving | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._engine, self._vectors, self._study, self._scorer = engine, vectors, study, scorer
        self._space = space or Space.of(vectors)
        self._halving = halving or Halving()
        self._say = on_event or (lambda event: None)
        # One order for all trials, so that their means over the first questions are paired.
        self._questions = sorted(
            {question.key: question for question in questions}.values(),
            key=lambda question: hashlib.sha256(f"{study.seed}:{question.key}".encode()).digest(),
        )
        self._halving.ladder(len(self._questions))
        self._steerings: dict[int, Steering] = {}

    def recipe(self) -> dict[str, str]:
        """What results depend on, beside model and tokenizer."""
        digest = hashlib.sha256()
        for method, held in sorted(self._vectors.items()):
            digest.update(f"{method} {held.layers}".encode())
            digest.update(held.values.float().cpu().contiguous().numpy().tobytes())
            digest.update(held.norms.float().cpu().contiguous().numpy().tobytes())
        asked = json.dumps([question.key for question in self._questions])
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
            raise BadInput(f"trials={trials}, batch_trials={batch_trials}", hint="take at least 1 of each")
        for bracket in self._study.open_brackets():
            self._say_round(trials)
            for trial in bracket:
                self._say(Event(kind="resumed", trial=trial))
            self._run_bracket(bracket)
        while (left := trials - self._study.num_asked()) > 0:
            asked = self._study.ask(self._space, min(left, batch_trials))
            self._say_round(trials)
            for trial in asked:
                self._say(Event(kind="started", trial=trial))
            self._run_bracket(asked)

    def _say_round(self, trials: int) -> None:
        counts = self._study.counts()
        ended = sum(number for state, number in counts.items() if state != "running")
        self._say(Event(kind="round", num_done=ended, num_total=max(trials, sum(counts.values()))))

    def conclude(
        self, *, fresh: Sequence[Question] = (), neutral: Sequence[tuple[int, ...]] = ()
    ) -> SearchResult:
        """Test the winner and the unsteered model; `neutral` are texts in tokens."""
        seen = {question.key for question in self._questions}
        fresh = list({question.key: question for question in fresh}.values())
        if any(question.key in seen for question in fresh):
            raise BadInput("a fresh question was asked in the search", hint="split the questions first")
        found = self._study.best()
        baseline = self._values(None, self._questions)
        tested, effects = None, None
        if found is not None:
            steered = self._values(found[0], fresh) if fresh else None
            plain = self._values(None, fresh) if fresh else None
            if steered is not None and plain is not None:
                tested = retest(steered, plain, seed=self._study.seed)
                self._say(
                    Event(
                        kind="retested",
                        trial=found[0],
                        value=tested.steered.value,
                        num_questions=tested.num_questions,
                    )
                )
            effects = self._side_effects(found[0], neutral)
        return SearchResult(
            best=None if found is None else found[0],
            best_value=None if found is None else found[1],
            baseline_value=None if baseline is None else math.fsum(baseline) / len(baseline),
            counts=self._study.counts(),
            cost_share=self._cost_share(),
            retest=tested,
            side_effects=effects,
        )

    def _run_bracket(self, trials: Sequence[Trial]) -> None:
        """Rungs until every trial has ended; rows that are kept from before are not run again."""
        by_number = {trial.number: trial for trial in trials}
        bracket = Bracket(list(by_number), num_questions=len(self._questions), halving=self._halving)
        while not bracket.is_over:
            rows = [(by_number[number], question) for number, question in bracket.pending()]
            self._answer(rows, bracket)
            for number, trial in by_number.items():
                if bracket.state(number) == "failed" and number in self._steerings:
                    self._study.fail(number, "a question gave no finite value")
                    self._say(Event(kind="failed", trial=trial, num_questions=bracket.num_answered(number)))
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
            self._say(Event(kind="row", trial=trial, value=score.value))

        self._ask([(trial, self._questions[question]) for trial, question in rows], answered)

    def _ask(
        self, rows: Sequence[tuple[Trial | None, Question]], on_score: Callable[[int, Score], None]
    ) -> None:
        """Every row once: what the log holds first, then the rest through the engine and into the log."""
        log = self._study.rows
        missing: list[int] = []
        for place, (trial, question) in enumerate(rows):
            if trial is not None:
                self._steering(trial)
            held = log.find(None if trial is None else trial.number, question.key)
            if held is None:
                missing.append(place)
            else:
                on_score(place, Score(value=held.value, text=held.text))

        def scored(number: int, score: Score) -> None:
            trial, question = rows[missing[number]]
            log.add(
                [
                    FinishedRow(
                        trial=None if trial is None else trial.number,
                        question=question.key,
                        value=score.value,
                        text=score.text,
                    )
                ]
            )
            on_score(missing[number], score)

        wanted = [(None if trial is None else self._steering(trial), question) for trial, question in rows]
        if missing:
            self._scorer.score(self._engine, [wanted[place] for place in missing], on_score=scored)

    def _steering(self, trial: Trial) -> Steering:
        """One object for each trial: rows that share it are one trial to the engine."""
        if trial.number not in self._steerings:
            self._steerings[trial.number] = steering_of(trial, self._vectors)
        return self._steerings[trial.number]

    def _tell(self, over: RungOver, by_number: Mapping[int, Trial]) -> None:
        for number, mean in over.means.items():
            self._study.report(number, value=mean, num_questions=over.num_questions)
            kind: Kind = "rung" if number in over.kept else "pruned" if number in over.pruned else "complete"
            if kind == "pruned":
                self._study.prune(number)
            elif kind == "complete":
                self._study.complete(number, mean)
            if kind != "rung":
                del self._steerings[number]
            self._say(Event(kind=kind, trial=by_number[number], value=mean, num_questions=over.num_questions))

    def _values(self, trial: Trial | None, questions: Sequence[Question]) -> list[float] | None:
        """The values of all questions, in their order; None if one gave no number."""
        values: dict[int, float | None] = {}
        self._ask(
            [(trial, question) for question in questions],
            lambda place, score: values.__setitem__(place, score.value),
        )
        found = [values[place] for place in range(len(questions))]
        finite = [value for value in found if value is not None]
        return finite if len(finite) == len(found) else None

    def _side_effects(self, trial: Trial, neutral: Sequence[tuple[int, ...]]) -> SideEffects | None:
        texts = [text for text in neutral if len(text) > 1]
        if not texts:
            return None
        steering = steering_of(trial, self._vectors)
        return side_effects(
            self._engine.log_likelihoods(texts, steering),
            self._engine.log_likelihoods(texts, None),
            seed=self._study.seed,
        )

    def _cost_share(self) -> float | None:
        asked = self._study.num_asked()
        log = self._study.rows
        log.reload()
        keys = [question.key for question in self._questions]
        run = sum(
            log.find(one.number, key) is not None for one in self._study.study.get_trials() for key in keys
        )
        return run / (asked * len(keys)) if asked else None


def search(
    model: nn.Module,
    tokenizer: Any,
    vectors: Mapping[str, SteeringVectors],
    questions: Sequence[Question],
    *,
    study: SearchStudy,
    trials: int,
    fresh: Sequence[Question] = (),
    neutral: Sequence[str] = (),
    space: Space | None = None,
    scorer: Scorer | None = None,
    batch_rows: int = 256,
    batch_trials: int = 16,
    max_tokens: int = 1024,
    halving: Halving | None = None,
    on_event: OnEvent | None = None,
) -> SearchResult:
    """Search `trials` configurations on `questions`; test the best on `fresh` ones and on `neutral` texts.

    Brackets of `batch_trials` trials are halved together: more of them fill a larger GPU, fewer let the
    sampler learn sooner.  `batch_rows` rows run at a time.  Scores are those of `MultipleChoice` unless a
    `scorer` is given.
    """
    engine = PackedTrials(
        model, slots=batch_rows, batch_tokens=batch_rows * TOKENS_PER_ROW, max_tokens=max_tokens
    )
    work = Search(
        engine,
        vectors,
        questions,
        study=study,
        scorer=scorer or MultipleChoice(tokenizer),
        space=space,
        halving=halving,
        on_event=on_event,
    )
    names = {"model": model_fingerprint(model), "tokenizer": tokenizer_fingerprint(tokenizer)}
    study.bind({**names, **work.recipe()})
    work.run(trials=trials, batch_trials=batch_trials)
    return work.conclude(fresh=fresh, neutral=neutral_tokens(neutral, tokenizer))


def neutral_tokens(texts: Sequence[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """Texts in tokens, in order."""
    if not texts:
        return []
    return encode(list(texts), tokenizer=tokenizer).tokens()
