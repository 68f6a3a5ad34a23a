"""Whole searches by a judge of texts: Optuna, decoding, judging and the log of rows included.

`steer search` runs `HalvedSearch`; so does this, over a journal of Optuna's, with the model and the vectors
there.  The usual way asks Optuna for a trial, steers the model by hooks, generates the texts of all questions
in one batch, judges them and tells the mean.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import torch
from generation import Load
from racing import Arm, race, rows_of
from subjects import WORDS, Subject, texts_of

from flatout.engines.steering.questions import Question, question_of
from flatout.engines.steering.search.halved_search import HalvedSearch
from flatout.engines.steering.search.halving import Halving
from flatout.engines.steering.search.space import Space, steering_of
from flatout.engines.steering.search.study import open_study
from flatout.engines.steering.trials.packed_trials import PackedTrials
from flatout.engines.steering.trials.scoring import Judged, encode_prompts
from flatout.engines.steering.trials.steered_model import steered_model
from flatout.engines.steering.vectors.steering_vectors import SteeringVectors
from flatout.multiplex.models.decoder import Decoder

BATCH_TRIALS = 32  # halved together, as `steer search` does
USUAL = "one trial at a time, transformers' generate and Optuna"


def known_words(question: Question, text: str) -> float:
    """Judge a text: how many of its words are among ours."""
    words = text.lower().split()
    return sum(word in WORDS for word in words) / max(1, len(words))


def searches(subject: Subject, decoder: Decoder, load: Load, *, seconds: float) -> list[dict[str, Any]]:
    """Trials per second of whole searches; every trial answers every question, unless it is halved."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    texts = texts_of(load.questions, longest=max(2, load.prompt // 2), seed=9)
    questions = [question_of(text, positive="yes", negative="no") for text in texts]
    vectors = {"random": _random_vectors(subject)}
    prompts = encode_prompts(texts, subject.tokenizer)
    engine = PackedTrials(
        decoder, slots=load.trial_slots, max_tokens=max(map(len, prompts)) + load.new, eos=()
    )
    judged = Judged(subject.tokenizer, known_words, name="known words", max_new_tokens=load.new)
    space = Space.of(vectors)

    def ours(rungs: int, batch_trials: int = BATCH_TRIALS) -> float:
        with tempfile.TemporaryDirectory() as folder:
            study = open_study(str(Path(folder) / "study.journal"), rows=Path(folder) / "rows")
            search = HalvedSearch(
                engine,
                vectors,
                questions,
                study=study,
                scorer=judged,
                space=space,
                halving=Halving(rungs=rungs),
            )
            search.run(trials=load.trials, batch_trials=batch_trials)
        return load.trials

    ids, mask = _padded(prompts, subject.device)

    def usual() -> float:
        with tempfile.TemporaryDirectory() as folder:
            study = open_study(str(Path(folder) / "study.journal"), rows=Path(folder) / "rows")
            (trial,) = study.ask(space, 1)
            with torch.no_grad(), steered_model(subject.model, steering_of(trial, vectors)):
                out = subject.model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=load.new,
                    min_new_tokens=load.new,
                    do_sample=False,
                    pad_token_id=0,
                )
            written = subject.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
            pairs = zip(questions, written, strict=True)
            values = [known_words(question, text) for question, text in pairs]
            study.complete(trial.number, sum(values) / len(values))
        return 1

    arms: dict[str, Arm] = {
        "search, every question": partial(ours, 1),
        "search, halved": partial(ours, 4),
        USUAL: usual,
    }
    if (half := load.trials // 2) > BATCH_TRIALS:  # the sampler still learns once
        arms["search, halved in two brackets"] = partial(ours, 4, half)
    found = race(arms, seconds=seconds, cuda=subject.device.type == "cuda")
    against = {name: {f"times {USUAL}": USUAL} for name in arms if name != USUAL}
    rows = rows_of(found, unit="trials", against=against)
    for row in rows:
        if row["per_s"] is not None:
            row["trials per hour"] = round(3600 * row["per_s"])
    return rows


def _random_vectors(subject: Subject) -> SteeringVectors:
    drawn = torch.randn(subject.num_layers, subject.width, generator=torch.Generator().manual_seed(0))
    return SteeringVectors(
        values=drawn / drawn.norm(dim=1, keepdim=True),
        norms=torch.ones(subject.num_layers),
        layers=tuple(range(subject.num_layers)),
        method="random",
    )


def _padded(prompts: list[tuple[int, ...]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers and mask of prompts, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + list(one) for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    return ids.to(device), mask.to(device)
