"""Whether the winner wins: fresh questions, paired intervals, and what steering costs elsewhere.

The best of fifty noisy trials is the luckiest as well as the best, so its score in the search says too much.
Winner and unsteered model are asked the same questions that the search never saw, and the interval is that of
the difference question by question: what makes a question hard hits both and cancels.

A resampled interval of few values is too narrow: it cannot leave their range, and it takes their spread for
the true one.  For normal values, a nominal 95 % interval of n values holds the true mean with the probability
that Student's t with n - 1 degrees of freedom stays below 1.96 sqrt((n - 1) / n): 0.5 for two values, 0.86
for six, 0.90 for ten.  Below ten there is a mean and no interval.

A strong vector also breaks the model's language.  The perplexity of neutral text, steered over unsteered,
says by how much: 1 is no harm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout.engines.run.ranks import device_name
from flatout.engines.steering.extract.tokens import encode
from flatout.engines.steering.model_blocks import blocks_of
from flatout.engines.steering.questions import Question, read_neutral
from flatout.engines.steering.report.record import (
    FEWEST,
    Continuation,
    Interval,
    Retest,
    StudyRecord,
    Trial,
    TrialRecord,
)
from flatout.engines.steering.search.halved_search import Event, HalvedSearch
from flatout.engines.steering.search.search_worker import SearchWorker
from flatout.engines.steering.search.space import steering_of
from flatout.engines.steering.trials.scoring import continue_prompts
from flatout.engines.steering.trials.trial_engine import TrialEngine
from flatout.ground import OnProgress
from flatout.ground.errors import BadInput
from flatout.measure.statistics import bootstrap_interval

if TYPE_CHECKING:
    import numpy.typing as npt

    from flatout.engines.steering.vectors.steering_vectors import SteeringVectors

    Doubles = npt.NDArray[np.float64]

NUM_RESAMPLES = 10_000
MOST_CHECKED = 12  # trials whose side effects are measured, the best first


def conclude_search(worker: SearchWorker, search: HalvedSearch, *, on_progress: OnProgress) -> StudyRecord:
    """Test the winner on fresh questions and neutral texts, and gather all that a report shows."""
    on_progress("testing the winner on fresh questions")
    settings, study = worker.settings, search.study
    best = study.best()
    winner = None if best is None else best[0]
    baseline = search.values(None, search.questions)
    texts = encode_neutral(read_neutral(settings.neutral), worker.loaded.tokenizer)
    harm = None
    if winner is not None and texts:
        harm = measure_harm(worker.engine, winner, worker.vectors, texts, seed=study.seed)
    continuations: tuple[Continuation, ...] = ()
    if winner is not None and settings.examples:
        on_progress("continuing a few prompts with and without the winner")
        continuations = _show_winner(worker, winner)
    cost = search.cost_share()
    notes = [] if cost is None else [f"rows run: {cost:.0%} of asking all"]
    if failed := study.counts()["failed"]:
        notes.append(f"{failed} trials failed")
    return StudyRecord(
        name=settings.study_name,
        model=Path(settings.model).name,
        num_layers=len(blocks_of(worker.loaded.model)),
        score_name=settings.score_name,
        trials=check_harm(study.records(), worker.engine, worker.vectors, texts),
        best=None if winner is None else winner.number,
        baseline_score=None if baseline is None else math.fsum(baseline) / len(baseline),
        retest=None if winner is None else retest_trial(search, winner, worker.split.fresh),
        perplexity_ratio=harm,
        examples=continuations,
        device=device_name(next(worker.loaded.model.parameters()).device),
        notes=tuple(notes),
    )


def retest_trial(search: HalvedSearch, trial: Trial, fresh: Sequence[Question]) -> Retest | None:
    """Ask a trial and the unsteered model the fresh questions; None if one gave no number."""
    seen = {question.key for question in search.questions}
    fresh = list({question.key: question for question in fresh}.values())
    if any(question.key in seen for question in fresh):
        raise BadInput("a fresh question was already asked in the search", hint="split the questions first")
    steered, plain = search.values(trial, fresh), search.values(None, fresh)
    if not fresh or steered is None or plain is None:
        return None
    found = compare_pairs(steered, plain, seed=search.study.seed)
    search.on_event(
        Event(kind="retested", trial=trial, value=found.steered.value, num_questions=found.num_questions)
    )
    return found


def compare_pairs(steered: Sequence[float], unsteered: Sequence[float], *, seed: int = 0) -> Retest:
    """Compare values of the same questions, in the same order, with and without steering."""
    if len(steered) != len(unsteered) or not steered:
        raise BadInput(
            f"{len(steered)} steered and {len(unsteered)} unsteered values",
            hint="a paired difference needs both of every question, and at least 1 question",
        )
    treated, plain = np.asarray(steered, dtype=float), np.asarray(unsteered, dtype=float)
    if not (np.isfinite(treated).all() and np.isfinite(plain).all()):
        raise BadInput("a value is not finite", hint="a trial that gives no number has failed")

    def mean(values: Doubles) -> Interval:
        return _interval(lambda drawn: values[drawn].mean(-1), num_values=len(values), seed=seed)

    return Retest(
        num_questions=len(treated),
        baseline=mean(plain),
        steered=mean(treated),
        difference=mean(treated - plain),
    )


def compare_perplexities(
    steered: Sequence[tuple[float, int]], unsteered: Sequence[tuple[float, int]], *, seed: int = 0
) -> Interval:
    """Compare perplexities, steered over unsteered, from each text's (log-likelihood, tokens)."""
    counts = [count for _, count in unsteered]
    if not counts or counts != [count for _, count in steered] or min(counts) < 1:
        raise BadInput(
            "neutral texts have no tokens to predict", hint="give at least one text of two or more tokens"
        )
    tokens = np.asarray(counts, dtype=float)
    lost = np.asarray([plain - treated for (plain, _), (treated, _) in zip(unsteered, steered, strict=True)])

    def ratio(drawn: npt.NDArray[np.int64]) -> Doubles:
        with np.errstate(over="ignore"):  # a model that is broken altogether has an infinite ratio
            return np.asarray(np.exp(lost[drawn].sum(-1) / tokens[drawn].sum(-1)))

    return _interval(ratio, num_values=len(counts), seed=seed)


def _interval(
    statistic: Callable[[npt.NDArray[np.int64]], Doubles], *, num_values: int, seed: int
) -> Interval:
    value = float(statistic(np.arange(num_values)))
    if num_values < FEWEST:
        return Interval(value=value, low=None, high=None)
    low, high = bootstrap_interval(
        statistic, num_values=num_values, num_resamples=NUM_RESAMPLES, random=np.random.default_rng(seed)
    )
    return Interval(value=value, low=low, high=high)


def encode_neutral(texts: Sequence[str], tokenizer: object) -> list[tuple[int, ...]]:
    """Encode neutral texts; those of a single token predict nothing and are left out."""
    return [tokens for tokens in encode(list(texts), tokenizer=tokenizer).tokens() if len(tokens) > 1]


def measure_harm(
    engine: TrialEngine,
    trial: Trial,
    vectors: Mapping[str, SteeringVectors],
    texts: Sequence[tuple[int, ...]],
    *,
    plain: Sequence[tuple[float, int]] | None = None,
    seed: int = 0,
) -> Interval | None:
    """Measure the perplexity of neutral texts under a trial, over the plain model's; None if infinite."""
    steered = engine.log_likelihoods(texts, steering_of(trial, vectors))
    unsteered = engine.log_likelihoods(texts, None) if plain is None else plain
    found = compare_perplexities(steered, unsteered, seed=seed)
    return found if all(map(math.isfinite, (found.value, *(found.bounds or ())))) else None


def check_harm(
    trials: Sequence[TrialRecord],
    engine: TrialEngine,
    vectors: Mapping[str, SteeringVectors],
    texts: Sequence[tuple[int, ...]],
) -> tuple[TrialRecord, ...]:
    """Add the harm they do to the best trials, and leave the rest as they are.

    Those that came furthest are the best: a pruned trial is known by few questions.
    """
    ranked = sorted(
        (trial for trial in trials if trial.score is not None),
        key=lambda trial: (-(trial.num_questions or 0), -(trial.score or 0.0), trial.number),
    )
    chosen = {trial.number for trial in ranked[:MOST_CHECKED]} if texts else set()
    plain = engine.log_likelihoods(texts, None) if chosen else []
    checked = []
    for record in trials:
        if record.number in chosen:
            harm = measure_harm(engine, record, vectors, texts, plain=plain)
            record = dataclasses.replace(record, perplexity_ratio=None if harm is None else harm.value)
        checked.append(record)
    return tuple(checked)


def _show_winner(worker: SearchWorker, winner: Trial) -> tuple[Continuation, ...]:
    asked = [question.prompt for question in worker.split.fresh[: worker.settings.examples]]
    engine = worker.make_engine(rows=2 * len(asked))  # slots that stay empty cost as much as full ones
    return continue_prompts(
        engine,
        worker.loaded.tokenizer,
        asked,
        steering_of(winner, worker.vectors),
        max_new_tokens=worker.settings.max_new_tokens,
    )
