"""The end of a search: the winner against the unsteered model, what the best ones break, and how it reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.engines.steering.blocks import blocks_of
from flatout.engines.steering.loading import Opened
from flatout.engines.steering.report.record import Example, StudyRecord, TrialRecord
from flatout.engines.steering.report.study_record import SCORE_NAMES, trial_records
from flatout.engines.steering.search.halved_search import Search, neutral_tokens
from flatout.engines.steering.search.neutral_texts import read_neutral
from flatout.engines.steering.search.retest import side_effects
from flatout.engines.steering.search.space import Trial, steering_of, trial_of
from flatout.engines.steering.settings import SearchSettings
from flatout.engines.steering.trials.packed_trials import PackedTrials
from flatout.engines.steering.trials.scoring import prompts_of
from flatout.engines.steering.trials.trial_engine import TextRow

if TYPE_CHECKING:
    from flatout.engines.steering.search.run_search import Split
    from flatout.engines.steering.search.study import SearchStudy
    from flatout.engines.steering.vectors.steering_vectors import SteeringVectors

MOST_CHECKED = 12  # trials whose side effects are measured, the best first

Say = Callable[[str], None]


def conclude(
    settings: SearchSettings,
    split: Split,
    opened: Opened,
    vectors: dict[str, SteeringVectors],
    *,
    study: SearchStudy,
    work: Search,
    engine: PackedTrials,
    say: Say,
) -> StudyRecord:
    """Test the winner on fresh questions and neutral texts, and gather all that a report shows."""
    say("testing the winner on fresh questions")
    neutral = neutral_tokens(read_neutral(settings.neutral), opened.tokenizer)
    result = work.conclude(fresh=split.fresh, neutral=neutral)
    trials = _with_side_effects(trial_records(study.study), engine, vectors, neutral)
    examples: tuple[Example, ...] = ()
    if result.best is not None and settings.examples:
        say("continuing a few prompts with and without the winner")
        from flatout.engines.steering.search.run_search import engine_of

        # Slots that stay empty cost as much as full ones: as many as there are texts.
        few = engine_of(dataclasses.replace(settings, rows=2 * settings.examples), split, opened)
        examples = continued(settings, split, opened, vectors, engine=few, best=result.best)
    notes = [] if result.cost_share is None else [f"rows run: {result.cost_share:.0%} of asking all"]
    if failed := result.counts.get("failed"):
        notes.append(f"{failed} trials failed")
    return StudyRecord(
        name=settings.study_name,
        model=Path(settings.model).name,
        num_layers=len(blocks_of(opened.model)),
        score_name=SCORE_NAMES[settings.toward],
        trials=trials,
        best=None if result.best is None else result.best.number,
        baseline_score=result.baseline_value,
        retest=result.retest,
        perplexity_ratio=None if result.side_effects is None else result.side_effects.ratio,
        examples=examples,
        device=_device_name(opened),
        notes=tuple(notes),
    )


def _with_side_effects(
    trials: Sequence[TrialRecord],
    engine: PackedTrials,
    vectors: dict[str, SteeringVectors],
    neutral: Sequence[tuple[int, ...]],
) -> tuple[TrialRecord, ...]:
    """The best trials with the harm they do; the rest as they are.

    Those that came furthest are the best: a pruned trial is known by few questions.
    """
    texts = [text for text in neutral if len(text) > 1]
    ranked = sorted(
        (trial for trial in trials if trial.score is not None),
        key=lambda trial: (-(trial.num_questions or 0), -(trial.score or 0.0), trial.number),
    )
    chosen = {trial.number for trial in ranked[:MOST_CHECKED]} if texts else set()
    plain = engine.log_likelihoods(texts, None) if chosen else []
    checked = []
    for trial in trials:
        if trial.number in chosen:
            steering = steering_of(_trial(trial), vectors)
            ratio = side_effects(engine.log_likelihoods(texts, steering), plain).ratio.value
            trial = dataclasses.replace(trial, perplexity_ratio=ratio if math.isfinite(ratio) else None)
        checked.append(trial)
    return tuple(checked)


def _trial(record: TrialRecord) -> Trial:
    params = {name: getattr(record, name) for name in ("layer", "method", "strength", "where")}
    made = trial_of(record.number, params)
    assert made is not None
    return made


def continued(
    settings: SearchSettings,
    split: Split,
    opened: Opened,
    vectors: dict[str, SteeringVectors],
    *,
    engine: PackedTrials,
    best: Trial,
) -> tuple[Example, ...]:
    """The same prompts with and without the winner, greedily, in one generation."""
    asked = split.fresh[: settings.examples]
    prompts = prompts_of(asked, opened.tokenizer)
    steering = steering_of(best, vectors)
    rows = [TextRow(prompt=prompt, steering=one) for one in (None, steering) for prompt in prompts]
    found = engine.texts(rows, max_new_tokens=settings.max_new_tokens)
    texts = [str(opened.tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in found]
    return tuple(
        Example(prompt=question.text, unsteered=unsteered, steered=steered)
        for question, unsteered, steered in zip(asked, texts[: len(asked)], texts[len(asked) :], strict=True)
    )


def _device_name(opened: Opened) -> str:
    import torch

    device = next(opened.model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
